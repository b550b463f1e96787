//! The commands.

pub mod args;
pub mod demo;
pub mod output;
