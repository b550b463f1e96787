//! HTTP from outside, on real servers: the API and its description, metrics, what `docker/`
//! expects of them, and the console in a real browser.

#![allow(clippy::unwrap_used, unreachable_pub)]

mod api;
mod browser;
mod console;
mod deploy;
mod metrics;
mod schema;
mod world;
