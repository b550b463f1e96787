//! For tests only: real servers of a test's own, a faulty proxy, a sink, a writer, and the oracle that judges them.
//!
//! Every server is a process with its own data folder and ports on loopback. It dies with its handle, and with the
//! test process however that ends. Servers need root: they run from a folder that `scripts/services provision` makes.

pub mod database;
pub mod process;
pub mod rabbit;
pub mod root;
pub mod wait;

pub use database::{Database, Mariadb, Mysql, MysqlOptions};
pub use rabbit::Rabbit;
