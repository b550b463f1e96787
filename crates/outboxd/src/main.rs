//! placeholder
#![allow(unreachable_pub)]
mod cli;
mod config;
mod health;
mod metrics;
mod supervise;
fn main() {}
