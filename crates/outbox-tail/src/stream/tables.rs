//! The tables that concern us: what a table id stands for, how their rows are decoded, and
//! whether the layout that would decode them is proven to be that of the event's time.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use outbox_core::binder::{BindContext, Binder};
use outbox_core::layout::TableLayout;
use outbox_core::ports::Deferral;
use outbox_core::spec::{TableSpec, Tracking};
use outbox_core::{OutboxRow, Position, TableIdx};

use super::sql::NameRule;
use crate::decode::{Flavour, RowsEvent, TableDecoder, TableMap};

/// Our own tables all begin with this.
const OWN_PREFIX: &[u8] = b"outboxd_";
const SIGNAL: &[u8] = b"outboxd_signal";

/// A configured outbox table, for the stream.
#[derive(Clone, Debug)]
pub struct StreamTable {
    /// Its place in the configuration.
    pub idx: TableIdx,
    /// Its section.
    pub spec: Arc<TableSpec>,
    /// `app_id` of its messages: the configured `name`.
    pub app_id: Arc<str>,
}

/// What is known of the layout of one table at the place that was read up to.
#[derive(Debug, Clone, PartialEq)]
enum Proof {
    /// It holds for what is read next, and for everything behind this position before it.
    Proven(Position),
    /// It holds for everything behind this position, which was not reached yet.
    Behind(Position),
    /// It has to be read (again).
    Wanted,
}

/// How to decode the rows of one table map.
#[derive(Debug)]
pub(crate) struct Decoding {
    decoder: TableDecoder,
    pub(crate) binder: Binder,
}

impl Decoding {
    pub(crate) fn rows<'a>(
        &'a self,
        event: &'a RowsEvent,
        zone_offset: i32,
    ) -> impl Iterator<Item = Result<crate::decode::Row, crate::decode::RowError>> + 'a {
        self.decoder.rows(event, zone_offset)
    }

    pub(crate) fn bind(
        &self,
        cells: &[outbox_core::Cell],
        context: BindContext,
    ) -> Result<OutboxRow, outbox_core::binder::BindError> {
        self.binder.bind(cells, context)
    }
}

/// A decoding plan, or why there is none.
pub(crate) type Plan = Result<Arc<Decoding>, (Deferral, String)>;

#[derive(Debug)]
struct Table {
    config: StreamTable,
    layout: Option<Arc<TableLayout>>,
    proof: Proof,
    /// The plan of the last table map, with the body that it was made for.
    plan: Option<(Bytes, Plan)>,
}

/// What a table id stands for, within one group.
#[derive(Clone, Debug)]
pub(crate) enum Target {
    /// A table that does not concern us.
    Other,
    /// One of our own.
    Own,
    /// The signal table.
    Signal,
    /// An outbox table, by its place among the stream's tables.
    Outbox(usize, Plan),
}

/// All tables of the stream.
#[derive(Debug)]
pub(crate) struct Tables {
    own_schema: String,
    pub(crate) rule: NameRule,
    pub(crate) flavour: Flavour,
    tables: Vec<Table>,
    targets: HashMap<u64, Target>,
    /// Rows are not wanted.
    scanning: bool,
}

impl Tables {
    pub(crate) fn new(own_schema: String, tables: Vec<StreamTable>) -> Self {
        let table = |config| Table {
            config,
            layout: None,
            proof: Proof::Wanted,
            plan: None,
        };
        Self {
            own_schema,
            rule: NameRule::default(),
            flavour: Flavour::Mysql,
            tables: tables.into_iter().map(table).collect(),
            targets: HashMap::new(),
            scanning: false,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.tables.len()
    }

    pub(crate) fn idx(&self, table: usize) -> TableIdx {
        self.tables[table].config.idx
    }

    pub(crate) fn spec(&self, table: usize) -> &TableSpec {
        &self.tables[table].config.spec
    }

    /// Whether rows may be left to the table.
    pub(crate) fn deferrable(&self, table: usize) -> bool {
        self.spec(table).tracking == Tracking::Status
    }

    /// Forgets the table ids of the group that ended: every statement maps its tables anew.
    pub(crate) fn end_of_group(&mut self) {
        self.targets.clear();
    }

    pub(crate) fn target(&self, id: u64) -> Option<Target> {
        self.targets.get(&id).cloned()
    }

    /// Takes a TABLE_MAP event. `None`: it is malformed.
    pub(crate) fn map(&mut self, data: &[u8]) -> Option<()> {
        let (id, schema, table) = TableMap::peek(data)?;
        let known = self.tables.iter().position(|t| {
            let spec = &t.config.spec;
            self.rule.eq(table, spec.table.as_bytes())
                && self.rule.eq(schema, spec.schema.as_bytes())
        });
        let target = match known {
            Some(place) => Target::Outbox(place, self.plan(place, data)),
            None if self.rule.eq(schema, self.own_schema.as_bytes())
                && table
                    .get(..OWN_PREFIX.len())
                    .is_some_and(|p| self.rule.eq(p, OWN_PREFIX)) =>
            {
                if self.rule.eq(table, SIGNAL) {
                    Target::Signal
                } else {
                    Target::Own
                }
            }
            None => Target::Other,
        };
        self.targets.insert(id, target);
        Some(())
    }

    fn plan(&mut self, place: usize, data: &[u8]) -> Plan {
        if self.scanning {
            return Err((Deferral::Layout, String::new()));
        }
        // Behind the table's number, which changes, equal bodies mean equal rows.
        let body = data.get(6..).unwrap_or_default();
        let flavour = self.flavour;
        let table = &mut self.tables[place];
        if let Some((known, plan)) = &table.plan
            && known[..] == *body
        {
            return plan.clone();
        }
        let plan = table.make_plan(&Bytes::copy_from_slice(data), flavour);
        if let Err((why, reason)) = &plan {
            let name = table.config.spec.full_name();
            let why = why.name();
            tracing::warn!(
                table = name,
                why,
                reason,
                "rows of an outbox table cannot be decoded"
            );
        }
        table.plan = Some((Bytes::copy_from_slice(body), plan.clone()));
        plan
    }

    /// A statement that may have changed the table: its layout is not known any more.
    pub(crate) fn unprove(&mut self, place: usize) {
        self.tables[place].proof = Proof::Wanted;
        self.tables[place].plan = None;
    }

    /// Tables whose layout has to be read.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = usize> + '_ {
        let wanted = |(i, t): (usize, &Table)| (t.proof == Proof::Wanted).then_some(i);
        self.tables.iter().enumerate().filter_map(wanted)
    }

    /// The layout behind `from`, where reading begins, is this one.
    pub(crate) fn prove(&mut self, place: usize, layout: TableLayout, from: Position) {
        let table = &mut self.tables[place];
        table.layout = Some(Arc::new(layout));
        table.proof = Proof::Proven(from);
        table.plan = None;
    }

    /// Reading goes back to an earlier position, up to which nothing is known.
    pub(crate) fn forget(&mut self) {
        (0..self.tables.len()).for_each(|place| self.unprove(place));
    }

    /// Reading goes back to `after`: everything from there on was read before, so that a change
    /// would have been seen.
    pub(crate) fn back_to(&mut self, after: &Position) {
        for table in &mut self.tables {
            if let Proof::Proven(from) = &table.proof
                && after.reaches(from) != Some(true)
            {
                table.proof = Proof::Behind(from.clone());
                table.plan = None;
            }
        }
    }

    /// The layout behind `from` is this one, as far as no further change is read.
    pub(crate) fn offer(&mut self, place: usize, layout: TableLayout, from: Position) {
        let table = &mut self.tables[place];
        table.layout = Some(Arc::new(layout));
        table.proof = Proof::Behind(from);
        table.plan = None;
    }

    /// Tables of which nothing may be deferred, with the positions behind which their layouts
    /// hold, ascending; what lies before has to be searched for changes.
    pub(crate) fn behind_for_certain(&self) -> Vec<(usize, Position)> {
        let behind = |(place, t): (usize, &Table)| match &t.proof {
            Proof::Behind(from) if t.config.spec.tracking == Tracking::None => {
                Some((place, from.clone()))
            }
            _ => None,
        };
        self.tables.iter().enumerate().filter_map(behind).collect()
    }

    /// The same tables, for a reader that only looks for changes of them.
    pub(crate) fn for_scan(&self) -> Self {
        let config = |t: &Table| StreamTable {
            spec: Arc::new(TableSpec {
                tracking: Tracking::Status,
                ..(*t.config.spec).clone()
            }),
            ..t.config.clone()
        };
        let tables = self.tables.iter().map(config).collect();
        Self {
            rule: self.rule,
            flavour: self.flavour,
            scanning: true,
            ..Self::new(self.own_schema.clone(), tables)
        }
    }

    /// No change lies between `after` and where the layout holds: it holds from `after` on.
    pub(crate) fn confirm(&mut self, place: usize, after: &Position) {
        self.tables[place].proof = Proof::Behind(after.clone());
        self.tables[place].plan = None;
    }

    /// Layouts that are proven now that everything up to `end` was read.
    pub(crate) fn reached(&mut self, end: &Position) -> Vec<(TableIdx, Option<TableLayout>)> {
        let mut proven = Vec::new();
        for table in &mut self.tables {
            if let Proof::Behind(from) = &table.proof
                && end.reaches(from) == Some(true)
            {
                table.proof = Proof::Proven(from.clone());
                table.plan = None;
                let layout = table.layout.as_deref().cloned();
                proven.push((table.config.idx, layout));
            }
        }
        proven
    }
}

impl Table {
    fn make_plan(&self, data: &Bytes, flavour: Flavour) -> Plan {
        let map =
            TableMap::parse(data, flavour).map_err(|e| (Deferral::Undecodable, e.to_string()))?;
        let Some(layout) = self.layout.as_deref() else {
            return Err((Deferral::Layout, "the layout is not known yet".to_owned()));
        };
        // The event's own names need no proof; columns found by their place do.
        let named = map.columns.iter().all(|c| c.name.is_some());
        if !matches!(self.proof, Proof::Proven(_)) && !named {
            let reason = "the table was changed and its layout of then is not known";
            return Err((Deferral::Layout, reason.to_owned()));
        }
        let StreamTable { idx, spec, app_id } = &self.config;
        let binder = Binder::new(*idx, Arc::clone(spec), layout, Arc::clone(app_id))
            .map_err(|e| (Deferral::Layout, e.to_string()))?;
        let decoder = TableDecoder::new(&map, layout, binder.wanted())
            .map_err(|e| (Deferral::Undecodable, e.to_string()))?;
        Ok(Arc::new(Decoding { decoder, binder }))
    }
}
