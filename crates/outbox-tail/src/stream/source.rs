use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{FutureExt as _, StreamExt as _};
use mysql_async::binlog::BinlogChecksumAlg;
use mysql_async::binlog::events::Event;
use mysql_async::{BinlogStream, DriverError};
use outbox_core::Position;
use outbox_core::layout::TableLayout;
use outbox_core::ports::{Layouts, Observer, PortError, PortResult, chain};
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::assemble::{Assembler, Fault, Step};
use super::connect::{self, StreamConfig, within};
use super::error::{LostPosition, LostReason, StreamDisposition, StreamError};
use super::event::{RawEvent, kind};
use super::facts::{self, Resume, ServerFacts};
use super::mariadb;
use super::scan;
use super::tables::{StreamTable, Tables};
use super::tip::Tip;
use crate::group::{Source, StreamItem};

/// How often progress without rows is told.
const PROGRESS: Duration = Duration::from_millis(200);
/// A reader that stays away for longer has paused, and hears nothing meanwhile. One that reads comes
/// back more often: its call for the next event is dropped and made again whenever something else happens.
const PAUSE: Duration = Duration::from_secs(2);
/// How long reading waits for a layout: what is read without it is left to the table.
const LAYOUT_LIMIT: Duration = Duration::from_secs(3);
/// How long after a failure a layout is asked for again.
const LAYOUT_RETRY: Duration = Duration::from_secs(5);
/// A damaged event may have been damaged on its way; so often it is read again before it counts
/// as damaged where it lies.
const DAMAGE_RETRIES: u32 = 2;
/// Polite closing of a connection that may be dead.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

type Asked = Vec<(usize, PortResult<(TableLayout, Position)>)>;

/// The stream from a server.
pub struct BinlogSource {
    config: StreamConfig,
    layouts: Arc<dyn Layouts>,
    observer: Arc<dyn Observer>,
    assembler: Assembler,
    stream: Option<BinlogStream>,
    coordinate: Option<Position>,
    tip: Tip,
    /// The position of the first open: the one that stored layouts belong to.
    stored: Option<Position>,
    ready: VecDeque<StreamItem>,
    asking: Option<AbortOnDropHandle<Asked>>,
    layouts_failed: Option<Instant>,
    heard: Instant,
    /// Since when somebody wants events without a pause, and when they were last asked for.
    reading_since: Instant,
    asked: Option<Instant>,
    told: Instant,
    /// Nothing but the dump's own preface was read since it was opened.
    fresh: bool,
    damaged: Option<(Position, u32)>,
}

impl std::fmt::Debug for BinlogSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BinlogSource")
            .field("end", self.assembler.end())
            .field("open", &self.stream.is_some())
            .finish_non_exhaustive()
    }
}

impl BinlogSource {
    /// A stream that is not open yet.
    #[must_use]
    pub fn new(
        config: StreamConfig,
        tables: Vec<StreamTable>,
        layouts: Arc<dyn Layouts>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let tables = Tables::new(config.own_schema.clone(), tables);
        let assembler = Assembler::new(tables, config.max_transaction_bytes, config.zone_offset);
        let now = Instant::now();
        Self {
            config,
            layouts,
            observer,
            assembler,
            stream: None,
            coordinate: None,
            tip: Tip::default(),
            stored: None,
            ready: VecDeque::new(),
            asking: None,
            layouts_failed: None,
            heard: now,
            reading_since: now,
            asked: None,
            told: now,
            fresh: true,
            damaged: None,
        }
    }

    fn lost(&mut self, reason: LostReason, certain: bool, detail: String) -> StreamError {
        self.assembler.forget();
        let from = self.assembler.end().clone();
        let to = self.coordinate.clone().unwrap_or_else(|| from.clone());
        StreamError::LostPosition(Box::new(LostPosition {
            from,
            to,
            reason,
            certain,
            detail,
        }))
    }

    /// Whether this server can continue behind `after`.
    fn verify(&self, after: &Position, facts: &ServerFacts) -> Result<(), StreamError> {
        facts::check_settings(facts)?;
        match facts::check_resume(after, facts) {
            Resume::Continue => Ok(()),
            Resume::Behind(missing) => Err(StreamError::Behind { missing }),
            Resume::NeedsGtid => Err(StreamError::halt(
                "position",
                "the position lies beyond 4 GiB in its file, where no dump can begin: needs GTID \
                 (gtid_mode = ON), or `position set` to the next file and a sweep",
            )),
            Resume::Lost {
                reason,
                certain,
                detail,
            } => Err(StreamError::LostPosition(Box::new(LostPosition {
                from: after.clone(),
                to: facts.coordinate.clone(),
                reason,
                certain,
                detail,
            }))),
        }
    }

    /// Takes the layouts that are stored with `after`, if they are: what was stored belongs to
    /// the position that is opened first.
    async fn stored_layouts(&mut self, after: &Position) -> Result<(), StreamError> {
        let tables = &mut self.assembler.tables;
        for place in 0..tables.len() {
            match timeout(LAYOUT_LIMIT, self.layouts.stored(tables.idx(place))).await {
                Ok(Ok(Some(layout))) => tables.prove(place, layout, after.clone()),
                Ok(Ok(None)) => {}
                Ok(Err(e)) => return Err(StreamError::Layouts(e)),
                Err(_) => {
                    return Err(StreamError::Timeout {
                        operation: "reading stored layouts",
                        limit: LAYOUT_LIMIT,
                    });
                }
            }
        }
        Ok(())
    }

    /// Starts asking for layouts that are wanted, if any and if it is time.
    fn ask_layouts(&mut self) {
        if self.asking.is_some()
            || self
                .layouts_failed
                .is_some_and(|t| t.elapsed() < LAYOUT_RETRY)
        {
            return;
        }
        let tables = &self.assembler.tables;
        let wanted: Vec<_> = tables
            .wanted()
            .map(|place| (place, tables.idx(place)))
            .collect();
        if wanted.is_empty() {
            return;
        }
        // A task of its own, so that a caller that gives up waiting for the next item again and
        // again does not start it anew every time.
        let layouts = Arc::clone(&self.layouts);
        self.asking = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let mut answers = Vec::new();
            for (place, idx) in wanted {
                let answer = timeout(LAYOUT_LIMIT, layouts.current(idx)).await;
                let answer = answer.unwrap_or_else(|e| {
                    Err(PortError::new(
                        outbox_core::ports::Disposition::Backoff,
                        "read a layout",
                        e,
                    ))
                });
                answers.push((place, answer));
            }
            answers
        })));
    }

    /// Takes the answer, if one is awaited. Cancel safe: the task goes on.
    async fn take_layouts(&mut self) {
        let Some(task) = &mut self.asking else {
            return;
        };
        let answers = task.await.unwrap_or_default();
        self.asking = None;
        self.layouts_failed = answers.is_empty().then(Instant::now);
        for (place, answer) in answers {
            match answer {
                Ok((layout, from)) => self.assembler.tables.offer(place, layout, from),
                Err(e) => {
                    let error = chain(&e);
                    tracing::warn!(error, "no layout of an outbox table: rows are left to it");
                    self.layouts_failed = Some(Instant::now());
                }
            }
        }
        self.report_proven();
    }

    fn report_proven(&mut self) {
        if let Some(group) = self.assembler.proven() {
            self.ready.push_back(StreamItem::Group(group));
        }
    }

    async fn advance(&mut self) -> Result<StreamItem, StreamError> {
        let now = Instant::now();
        if self.asked.is_none_or(|t| now - t > PAUSE) {
            self.reading_since = now;
        }
        self.asked = Some(now);
        loop {
            if let Some(item) = self.ready.pop_front() {
                self.told = Instant::now();
                return Ok(item);
            }
            self.ask_layouts();
            if self.asking.is_some() {
                self.take_layouts().await;
                continue;
            }
            let moved = self.assembler.since().moved;
            if moved && self.told.elapsed() >= PROGRESS {
                return Ok(self.progress());
            }
            let silence = 3 * self.config.heartbeat;
            let dead = self.heard.max(self.reading_since) + silence;
            let wake = if moved {
                dead.min(self.told + PROGRESS)
            } else {
                dead
            };
            let stream = self.stream.as_mut().ok_or(StreamError::NotOpen)?;
            // The driver panics on some malformed events.
            let next = AssertUnwindSafe(stream.next()).catch_unwind();
            match tokio::time::timeout_at(wake, next).await {
                Err(_) if Instant::now() >= dead => return Err(StreamError::Silent(silence)),
                Err(_) => {}
                Ok(Err(_)) => return Err(self.damage("the driver cannot parse it", None)),
                Ok(Ok(None)) => return Err(StreamError::Ended),
                Ok(Ok(Some(Err(e)))) => return Err(self.failed(e)),
                Ok(Ok(Some(Ok(event)))) => {
                    self.heard = Instant::now();
                    self.take(&event)?;
                }
            }
        }
    }

    fn progress(&mut self) -> StreamItem {
        let since = self.assembler.take_since();
        self.told = Instant::now();
        StreamItem::Progress {
            end: self.assembler.end().clone(),
            committed_at: since.committed_at,
            own_only: !since.foreign,
        }
    }

    /// Feeds one event.
    fn take(&mut self, event: &Event) -> Result<(), StreamError> {
        let raw = raw(event);
        if !self.assembler.in_payload() && !sum_is_right(event, &raw) {
            return Err(self.damage("its checksum is wrong", None));
        }
        self.fresh &= raw.is_artificial();
        match self.assembler.feed(&raw) {
            Ok(Step::Quiet | Step::Boundary) => {}
            Ok(Step::Group(group)) => {
                self.assembler.take_since();
                self.ready.push_back(StreamItem::Group(*group));
            }
            Ok(Step::Heartbeat) => {
                let moved = self.assembler.since().moved;
                let at_the_end = self.tip.reached_by(&self.assembler.place().file, &raw);
                let item = match (moved, at_the_end) {
                    (true, _) => Some(self.progress()),
                    (false, true) => Some(StreamItem::Idle),
                    (false, false) => None,
                };
                self.ready.extend(item);
            }
            Err(Fault::Unreadable(reason)) => return Err(self.undecodable(reason, None)),
            Err(Fault::Reset(detail)) => return Err(self.lost(LostReason::Reset, false, detail)),
            Err(Fault::ModeChanged) => {
                return Err(StreamError::Unavailable {
                    operation: "reading the binlog",
                    source: "the server's gtid_mode was changed".into(),
                });
            }
        }
        Ok(())
    }

    fn undecodable(&self, reason: String, source: Option<Box<mysql_async::Error>>) -> StreamError {
        StreamError::Undecodable {
            after: self.assembler.end().to_string(),
            near: self.assembler.place().to_string(),
            reason,
            source: source.map(|e| e as _),
        }
    }

    /// Damage counts only when it is there again after it was read anew.
    fn damage(&mut self, reason: &str, source: Option<Box<mysql_async::Error>>) -> StreamError {
        let end = self.assembler.end();
        let before = self
            .damaged
            .take()
            .filter(|(at, _)| at == end)
            .map_or(0, |(_, n)| n);
        self.damaged = Some((end.clone(), before + 1));
        if before >= DAMAGE_RETRIES {
            return self.undecodable(format!("an event is damaged: {reason}"), source);
        }
        StreamError::Unavailable {
            operation: "reading the binlog",
            source: match source {
                Some(e) => e,
                None => format!("an event is damaged: {reason}").into(),
            },
        }
    }

    /// What an error of the driver means in the middle of a dump.
    fn failed(&mut self, error: mysql_async::Error) -> StreamError {
        use std::io::ErrorKind;
        let operation = "reading the binlog";
        match &error {
            mysql_async::Error::Server(e) if e.code == 1236 => self.refused(error),
            mysql_async::Error::Io(mysql_async::IoError::Io(e))
                if matches!(e.kind(), ErrorKind::InvalidData | ErrorKind::Other) =>
            {
                self.damage("the driver cannot parse it", Some(Box::new(error)))
            }
            mysql_async::Error::Driver(DriverError::PacketTooLarge) => self.undecodable(
                "an event is larger than 1 GiB".to_owned(),
                Some(Box::new(error)),
            ),
            _ => connect::classify(operation, error),
        }
    }

    /// Error 1236 has many meanings; only its text tells.
    fn refused(&mut self, error: mysql_async::Error) -> StreamError {
        let text = error.to_string();
        let says = |words: &[&str]| words.iter().any(|w| text.contains(w));
        if says(&["same server_uuid/server_id"]) {
            return StreamError::ServerIdTaken {
                server_id: self.config.server_id,
                source: Box::new(error),
            };
        }
        if says(&[
            "Could not find first log file",
            "Could not find GTID state",
            "purged",
        ]) {
            return self.lost(LostReason::Purged, true, text);
        }
        let unknown = [
            "more GTIDs than",
            "not in the master's binlog",
            "binlog on the master is missing the GTID",
        ];
        if says(&unknown) {
            return self.lost(LostReason::NotContained, false, text);
        }
        if says(&["impossible position", "> file size"]) {
            return self.lost(LostReason::Reset, false, text);
        }
        let garbage = [
            "bogus data",
            "max_allowed_packet",
            "truncated",
            "log event entry",
        ];
        if says(&garbage) {
            // The size of an event that is none is what "too large" mostly means.
            if self.fresh && matches!(self.assembler.end(), Position::File(_)) {
                let detail = "no event begins at the stored offset".to_owned();
                return self.lost(LostReason::InvalidOffset, false, detail);
            }
            return self.damage("the server cannot read it", Some(Box::new(error)));
        }
        connect::classify("reading the binlog", error)
    }

    fn disconnected(&mut self) -> Option<BinlogStream> {
        let stream = self.stream.take()?;
        self.observer.tail_connected(false);
        Some(stream)
    }
}

pub(super) fn raw(event: &Event) -> RawEvent<'_> {
    let header = event.header();
    RawEvent {
        kind: header.event_type_raw(),
        flags: header.flags_raw(),
        timestamp: header.timestamp(),
        server_id: header.server_id(),
        size: header.event_size(),
        log_pos: header.log_pos(),
        data: event.data(),
    }
}

/// Whether the event's sum is right, or it has none.
fn sum_is_right(event: &Event, raw: &RawEvent<'_>) -> bool {
    // The first rotate of a dump comes before its reader can know of checksums.
    if raw.kind == kind::ROTATE && raw.is_artificial() {
        return true;
    }
    match (event.footer().get_checksum_alg(), event.checksum()) {
        (Ok(Some(alg @ BinlogChecksumAlg::BINLOG_CHECKSUM_ALG_CRC32)), Some(sum)) => {
            event.calc_checksum(alg) == u32::from_le_bytes(sum)
        }
        _ => true,
    }
}

#[async_trait]
impl Source for BinlogSource {
    async fn open(&mut self, after: &Position) -> Result<(), StreamError> {
        self.close().await;
        self.stored.get_or_insert_with(|| after.clone());
        let limit = self.config.connect_timeout;
        let mut conn = connect::connect(&self.config).await?;
        let operation = "reading the server's settings";
        let facts = within(limit, operation, facts::read(&mut conn)).await?;
        self.verify(after, &facts).inspect_err(|e| {
            if e.disposition() == StreamDisposition::LostPosition {
                self.assembler.forget();
            }
        })?;

        let stored_here = self.stored.as_ref() == Some(after);
        let after = &mariadb::by_list(&mut conn, &self.config, after, &facts).await?;
        let known = self.assembler.knows(after);
        self.assembler.served_by(&facts);
        let operation = "finding the file to begin with";
        let first = mariadb::first_file(&mut conn, after, &facts);
        self.assembler.first_file = within(limit, operation, first).await?;
        let taken_at = self.config.position_stored_at.filter(|_| stored_here);
        let server = facts::source_of(&facts.server).unwrap_or_default();
        self.assembler.restart(after, taken_at, server);
        if stored_here && !known {
            self.stored_layouts(after).await?;
        }
        // Now, so that as little as can be lies between the position and the layout.
        self.layouts_failed = None;
        self.ask_layouts();
        self.take_layouts().await;
        let behind = self.assembler.tables.behind_for_certain();
        if let Some((_, until)) = behind.last() {
            let tables = self.assembler.tables.for_scan();
            let changed = scan::changed(&self.config, &facts, tables, after, until).await?;
            for (place, _) in behind.iter().filter(|(p, _)| !changed.contains(p)) {
                self.assembler.tables.confirm(*place, after);
            }
            self.report_proven();
        }
        connect::prepare(&mut conn, &self.config, &facts).await?;
        let stream = connect::dump(conn, &self.config, after).await?;
        self.tip = Tip::of(&facts);
        self.coordinate = Some(facts.coordinate);
        self.fresh = true;
        self.heard = Instant::now();
        self.told = self.heard;
        self.stream = Some(stream);
        self.observer.tail_connected(true);
        Ok(())
    }

    async fn next(&mut self) -> Result<StreamItem, StreamError> {
        let item = self.advance().await;
        if item.is_err() {
            // Dropped, not closed: the link may be dead, and there is nothing to say.
            drop(self.disconnected());
        }
        item
    }

    async fn close(&mut self) {
        self.ready.clear();
        self.asking = None;
        if let Some(stream) = self.disconnected() {
            // Politely, so that the server ends its thread at once; it does not matter if not.
            let _ = timeout(CLOSE_LIMIT, stream.close()).await;
        }
    }

    fn coordinate_at_open(&self) -> Option<&Position> {
        self.coordinate.as_ref()
    }
}
