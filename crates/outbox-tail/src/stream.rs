//! to be written

/// To be replaced.
#[derive(Debug, thiserror::Error)]
pub enum StreamError {}
