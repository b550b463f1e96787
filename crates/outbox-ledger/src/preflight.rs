//! Checks before the start. Being written by the second half of this crate: see claims.rs.
