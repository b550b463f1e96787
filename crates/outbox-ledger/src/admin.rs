//! What operators do with rows: list, show, retry, abandon, replay, purge; in parked rows too.
//! Being written by the second half of this crate: see claims.rs and parked.rs.
