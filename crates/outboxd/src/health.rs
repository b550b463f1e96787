//! What this instance is doing, for `/livez`, `/readyz`, the status and the console.

use std::sync::Arc;

use serde::Serialize;
use tokio::sync::watch;

/// The part that this instance plays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Not yet decided.
    #[default]
    Starting,
    /// Another instance leads; this one is ready to take over.
    Standby,
    /// Tails, polls and sweeps.
    Leader,
    /// Cannot go on without an operator.
    Halted,
    /// Ending.
    Stopping,
}

/// One part of readiness.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Whether it does its duty.
    pub ok: bool,
    /// In words, without secrets.
    pub detail: String,
}

impl Part {
    /// A part that is well.
    pub fn good(detail: impl Into<String>) -> Self {
        Self {
            ok: true,
            detail: detail.into(),
        }
    }

    /// A part that is not.
    pub fn bad(detail: impl Into<String>) -> Self {
        Self {
            ok: false,
            detail: detail.into(),
        }
    }
}

/// Everything that readiness depends on.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Health {
    /// The role.
    pub role: Role,
    /// The database connection.
    pub mysql: Part,
    /// The broker connection.
    pub rabbitmq: Part,
    /// The replication stream.
    pub tail: Part,
    /// Configured tables that cannot be used and are left out, with the reason.
    pub broken_tables: Vec<String>,
    /// Gaps that nobody has acknowledged.
    pub gaps: u64,
    /// Whether publishing is paused for every table.
    pub paused: bool,
}

impl Health {
    /// Whether this instance does its duty: leading with everything up, no open gap and every table, or
    /// standing by.
    pub fn ready(&self) -> bool {
        match self.role {
            Role::Standby => self.mysql.ok,
            Role::Leader => {
                self.mysql.ok
                    && self.rabbitmq.ok
                    && self.tail.ok
                    && self.gaps == 0
                    && self.broken_tables.is_empty()
            }
            Role::Starting | Role::Halted | Role::Stopping => false,
        }
    }
}

/// Shared, changed by the tasks that know.
#[derive(Clone, Debug)]
pub struct HealthBoard(Arc<watch::Sender<Health>>);

impl Default for HealthBoard {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(Health::default())))
    }
}

impl HealthBoard {
    /// Changes it; readers are woken only by a difference.
    pub fn change(&self, f: impl FnOnce(&mut Health)) {
        self.0.send_modify(f);
    }

    /// As it is.
    pub fn get(&self) -> Health {
        self.0.borrow().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_is_ready_only_with_everything_up_and_no_gap() {
        let up = Health {
            role: Role::Leader,
            mysql: Part::good(""),
            rabbitmq: Part::good(""),
            tail: Part::good(""),
            ..Health::default()
        };
        assert!(up.ready());
        assert!(
            !Health {
                gaps: 1,
                ..up.clone()
            }
            .ready()
        );
        assert!(
            !Health {
                rabbitmq: Part::bad("away"),
                ..up.clone()
            }
            .ready()
        );
        assert!(
            !Health {
                tail: Part::bad("away"),
                ..up.clone()
            }
            .ready()
        );
        assert!(
            Health {
                role: Role::Standby,
                tail: Part::bad(""),
                ..up
            }
            .ready()
        );
        assert!(!Health::default().ready());
    }
}
