use outbox_core::Cell;

use super::error::{CellError, Malformed, PartialRow, RowError};
use super::plan::TableDecoder;
use super::read::{Reader, bit};
use super::rows_event::{RowsEvent, RowsKind};

/// One changed row; cells in the order of `wanted`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The image before an update or delete.
    pub before: Option<Vec<Cell>>,
    /// The image after an insert or update.
    pub after: Option<Vec<Cell>>,
}

impl TableDecoder {
    /// The rows of an event. TIMESTAMP columns are printed at `zone_offset`, in seconds east of
    /// UTC. Rows end after [`RowError::Malformed`].
    pub fn rows<'a>(
        &'a self,
        event: &'a RowsEvent,
        zone_offset: i32,
    ) -> impl Iterator<Item = Result<Row, RowError>> + 'a {
        Rows {
            decoder: self,
            event,
            rest: Reader::new(&event.rows, "row"),
            zone_offset,
        }
    }
}

struct Rows<'a> {
    decoder: &'a TableDecoder,
    event: &'a RowsEvent,
    rest: Reader<'a>,
    zone_offset: i32,
}

impl Iterator for Rows<'_> {
    type Item = Result<Row, RowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let before = self.rest.rest().len();
        let row = if self.event.columns == self.decoder.columns.len() {
            self.row()
        } else {
            Err(Malformed::new("number of columns").into())
        };
        let stuck = self.rest.rest().len() == before;
        if stuck || matches!(row, Err(RowError::Malformed(_))) {
            self.rest = Reader::new(&[], "row");
        }
        Some(match row {
            // An image without columns takes no bytes and would be read for ever.
            Ok(_) if stuck => Err(Malformed::new("row").into()),
            row => row,
        })
    }
}

/// The cells of one image as far as they have values, and the first that has none.
struct Image {
    cells: Vec<Option<Cell>>,
    flaw: Option<(usize, CellError)>,
}

impl Rows<'_> {
    fn row(&mut self) -> Result<Row, RowError> {
        let event = self.event;
        let (before, after) = match event.kind {
            RowsKind::Write => (None, Some(self.image(&event.first, false)?)),
            RowsKind::Delete => (Some(self.image(&event.first, false)?), None),
            RowsKind::Update | RowsKind::PartialUpdate => {
                let before = self.image(&event.first, false)?;
                let partial = event.kind == RowsKind::PartialUpdate;
                (Some(before), Some(self.image(&event.second, partial)?))
            }
        };
        finish(before, after)
    }

    fn image(&mut self, present: &[u8], partial: bool) -> Result<Image, Malformed> {
        let decoder = self.decoder;
        // Which JSON columns hold a difference: one bit for each JSON column of the table.
        let differences = if partial && self.rest.lenenc()? & 1 == 1 {
            let json = decoder.columns.iter().filter(|c| c.json).count();
            self.rest.take(json.div_ceil(8))?
        } else {
            &[]
        };
        let count = (0..decoder.columns.len())
            .filter(|i| bit(present, *i))
            .count();
        let nulls = self.rest.take(count.div_ceil(8))?;
        let mut image = Image {
            cells: vec![None; decoder.wanted],
            flaw: None,
        };
        let (mut position, mut json) = (0, 0);
        for (i, column) in decoder.columns.iter().enumerate() {
            let difference = column.json && bit(differences, json);
            json += usize::from(column.json);
            let raw = if !bit(present, i) {
                None
            } else {
                position += 1;
                if bit(nulls, position - 1) {
                    Some(None)
                } else {
                    Some(Some(column.size.take(&mut self.rest)?))
                }
            };
            let Some((place, print)) = &column.wanted else {
                continue;
            };
            let cell = match raw {
                None => Err(CellError::Absent),
                Some(None) => Ok(Cell::Null),
                Some(Some(_)) if difference => Err(CellError::PartialJson),
                Some(Some(raw)) => print.cell(&self.event.rows, raw, self.zone_offset),
            };
            match cell {
                Ok(cell) => image.cells[*place] = Some(cell),
                Err(why) => {
                    image.flaw.get_or_insert((*place, why));
                }
            }
        }
        for (from, to) in &decoder.copies {
            image.cells[*to] = image.cells[*from].clone();
        }
        Ok(image)
    }
}

fn finish(before: Option<Image>, after: Option<Image>) -> Result<Row, RowError> {
    let flaw = |image: &Option<Image>| image.as_ref().and_then(|i| i.flaw);
    let Some((column, why)) = flaw(&after).or_else(|| flaw(&before)) else {
        let whole = |image: Option<Image>| image.map(|i| i.cells.into_iter().flatten().collect());
        return Ok(Row {
            before: whole(before),
            after: whole(after),
        });
    };
    let partial = Box::new(PartialRow {
        column,
        why,
        before: before.map(|i| i.cells),
        after: after.map(|i| i.cells),
    });
    Err(match why {
        CellError::Absent | CellError::PartialJson => RowError::PartialImage(partial),
        CellError::Invalid(_) => RowError::Undecodable(partial),
    })
}
