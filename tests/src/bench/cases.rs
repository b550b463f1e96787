//! What rows look like, and what they are published to.

use clap::ValueEnum;

/// A kind of row and queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Case {
    /// JSON of 500 bytes, quorum queue.
    Json500,
    /// JSON of 18 bytes, quorum queue.
    Json18,
    /// JSON of 10,000 bytes, quorum queue.
    Json10k,
    /// JSON of 500 bytes, classic queue.
    Classic,
    /// 500 bytes in a BLOB, quorum queue.
    Blob,
}

/// The number in a body has always as many digits, so that all bodies are of one length.
const FIRST: u64 = 10_000_000_000;

impl Case {
    /// As the report calls it.
    pub fn title(self) -> &'static str {
        match self {
            Self::Json500 => "JSON 500 B, quorum queue",
            Self::Json18 => "JSON 18 B, quorum queue",
            Self::Json10k => "JSON 10 KB, quorum queue",
            Self::Classic => "JSON 500 B, classic queue",
            Self::Blob => "BLOB 500 B, quorum queue",
        }
    }

    /// `x-queue-type`.
    pub fn queue_type(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            _ => "quorum",
        }
    }

    /// The payload column's type.
    pub fn column(self) -> &'static str {
        match self {
            Self::Blob => "LONGBLOB",
            _ => "JSON",
        }
    }

    /// The messages' content type.
    pub fn content_type(self) -> &'static str {
        match self {
            Self::Blob => "application/octet-stream",
            _ => "application/json",
        }
    }

    /// Rows of this case where the first case has `rows`.
    pub fn rows(self, rows: u32) -> u32 {
        match self {
            Self::Json500 => rows,
            Self::Json10k => (rows / 20).max(1),
            _ => (rows / 4).max(1),
        }
    }

    /// The body of message `n`, in the server's own spelling.
    pub fn body(self, n: u32) -> String {
        let number = FIRST + u64::from(n);
        let bytes = match self {
            Self::Json18 => return format!("{{\"n\": {number}}}"),
            Self::Json10k => 10_000,
            _ => 500,
        };
        let around = "{\"n\": 10000000000, \"pad\": \"\"}".len();
        format!(
            "{{\"n\": {number}, \"pad\": \"{}\"}}",
            "x".repeat(bytes - around)
        )
    }

    /// The aggregate of row `n`.
    pub fn aggregate(n: u32) -> String {
        format!("order-{}", n % 1000)
    }
}
