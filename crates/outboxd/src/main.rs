//! placeholder
#![allow(unreachable_pub)]
mod config;
mod metrics;
mod supervise;
fn main() {}
