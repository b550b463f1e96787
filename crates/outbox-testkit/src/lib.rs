//! For tests only: real servers of a test's own, a faulty proxy, a sink, a writer, and the oracle that judges them.
//!
//! Every server is a process with its own data folder and ports on loopback. It dies with its handle, and with the
//! test process however that ends. Servers need root: they run from a folder that `scripts/services provision` makes.

pub mod database;
pub mod fakes;
pub mod http;
pub mod oracle;
pub mod outboxd;
pub mod process;
pub mod proxy;
pub mod rabbit;
pub mod root;
pub mod sink;
pub mod wait;
pub mod writer;

pub use database::{Database, Mariadb, Mysql, MysqlOptions};
pub use oracle::{Oracle, Verdict};
pub use outboxd::{Outboxd, OutboxdConfig};
pub use proxy::{Direction, Proxy};
pub use rabbit::Rabbit;
pub use sink::{Received, Sink};
pub use writer::{Writer, WriterOptions, Written};
