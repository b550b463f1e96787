//! Binlog to RabbitMQ: the replication stream, the row decoder, the publisher with its confirm
//! accounting, and the loop that ties them together.
//!
//! * [`stream`] reads groups from the server and gives them as [`group::StreamItem`]s;
//! * [`decode`] turns row events of the outbox tables into cells;
//! * [`rabbit`] publishes and accounts for every confirm;
//! * [`relay`] owns window, order and position.

pub mod decode;
pub mod group;
pub mod rabbit;
pub mod relay;
pub mod stream;
