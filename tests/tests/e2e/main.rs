//! The whole program on real servers, under faults. One binary, so that the tests share one broker.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod broker;
mod content;
mod dump;
mod instances;
mod mariadb;
mod operation;
mod order;
mod poller;
mod position;
mod refusals;
mod rows;
mod tables;
