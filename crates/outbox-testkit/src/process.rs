//! A process that never outlives its handle, nor the test process.

use std::ffi::OsStr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{LazyLock, mpsc};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::wait;

type Job = (Command, mpsc::Sender<std::io::Result<Child>>);

/// The kernel's parent-death signal fires when the *thread* that forked ends, and a test's thread ends with the test
/// while a shared server has to live on: one thread that stays does all the forking.
static SPAWNER: LazyLock<mpsc::Sender<Job>> = LazyLock::new(|| {
    let (jobs, queue) = mpsc::channel::<Job>();
    std::thread::spawn(move || {
        for (mut command, answer) in queue {
            // A caller that is gone drops the child's handle; the parent-death signal still ends the child.
            let _ = answer.send(command.spawn());
        }
    });
    jobs
});

/// A running (or ended) child process in a process group of its own. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    contained: bool,
}

/// The command line for a program that is killed when the test process ends, in any way.
pub(crate) fn tied(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// The same, in mount and process namespaces of its own (and in `root`): whatever it forks dies with it.
pub(crate) fn contained(root: Option<&Path>, program: &str) -> Command {
    let mut command = tied("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    if let Some(root) = root {
        command.arg("--root").arg(root).arg("--wd=/");
    }
    command.arg("--").arg(program);
    command
}

impl Process {
    /// Starts `command` in a process group of its own. `contained` says whether it came from [`contained`].
    pub(crate) fn spawn(mut command: Command, contained: bool) -> Result<Self> {
        command.stdin(Stdio::null()).process_group(0);
        let name = format!("starting {command:?}");
        let (answer, result) = mpsc::channel();
        SPAWNER
            .send((command, answer))
            .map_err(|_| anyhow!("the spawning thread is gone"))?;
        let child = result.recv()?.context(name)?;
        Ok(Self { child, contained })
    }

    fn group(&self) -> Result<Pid> {
        Ok(Pid::from_raw(i32::try_from(self.child.id())?))
    }

    /// The process that does the work: the one inside the namespaces, else the child itself.
    fn worker(&self) -> Result<Pid> {
        let id = self.child.id();
        if !self.contained {
            return self.group();
        }
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
        let first = children
            .split_whitespace()
            .next()
            .context("nothing runs inside")?;
        Ok(Pid::from_raw(first.parse()?))
    }

    /// Its status if it has ended.
    ///
    /// # Errors
    /// The system's.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// The process id of the program, as seen from outside.
    ///
    /// # Errors
    /// It has ended.
    pub fn pid(&self) -> Result<u32> {
        Ok(u32::try_from(self.worker()?.as_raw())?)
    }

    /// SIGKILL, and waits until nothing of it is left: its ports and its files are free afterwards.
    ///
    /// # Errors
    /// The system's.
    pub fn kill9(&mut self) -> Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        // Killing the first process inside ends them all, and the one outside ends after the last of them; so prefer
        // that to killing the group, which leaves the inner ones dying while we believe them dead.
        match self.worker() {
            Ok(pid) => kill(pid, Signal::SIGKILL)?,
            Err(_) => killpg(self.group()?, Signal::SIGKILL)?,
        }
        // One that was stopped has to run to see its child's end.
        let _ = killpg(self.group()?, Signal::SIGCONT);
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM, then waits for the end; kills it after `timeout` and says so.
    ///
    /// # Errors
    /// It did not end by itself.
    pub async fn terminate(&mut self, timeout: Duration) -> Result<ExitStatus> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        kill(self.worker()?, Signal::SIGTERM)?;
        let waited = wait::until_ok("the process ends after SIGTERM", timeout, async || {
            self.ended().ok().flatten().ok_or("still runs")
        })
        .await;
        if waited.is_err() {
            self.kill9()?;
        }
        waited
    }

    /// SIGSTOP to all of it.
    ///
    /// # Errors
    /// It has ended.
    pub fn pause(&self) -> Result<()> {
        Ok(killpg(self.group()?, Signal::SIGSTOP)?)
    }

    /// SIGCONT to all of it.
    ///
    /// # Errors
    /// It has ended.
    pub fn resume(&self) -> Result<()> {
        Ok(killpg(self.group()?, Signal::SIGCONT)?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(error) = self.kill9() {
            tracing::warn!(%error, "a test's process may have been left behind");
        }
    }
}
