//! A TCP proxy on loopback that can do to a connection what networks do.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::root;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    ToServer,
    /// From the server to the client.
    ToClient,
}

#[derive(Debug, Clone, Copy, Default)]
struct Way {
    delay: Duration,
    hole: bool,
    closed: bool,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    ways: [Way; 2],
    refuse: bool,
    cuts: u64,
}

#[derive(Debug, Default)]
struct Counters {
    accepted: AtomicUsize,
    open: AtomicUsize,
}

/// A proxy in front of one server. It starts by passing everything; dropping it resets every connection.
#[derive(Debug)]
pub struct Proxy {
    /// Where it listens on 127.0.0.1.
    pub port: u16,
    state: watch::Sender<State>,
    counters: Arc<Counters>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// A proxy to 127.0.0.1:`target`.
    ///
    /// # Errors
    /// No free port.
    pub async fn start(target: u16) -> Result<Self> {
        let mut attempts = 0;
        let listener = loop {
            match TcpListener::bind(("127.0.0.1", root::free_port()?)).await {
                Ok(listener) => break listener,
                Err(error) if attempts >= 5 => return Err(error.into()),
                Err(_) => attempts += 1,
            }
        };
        let port = listener.local_addr()?.port();
        let (state, seen) = watch::channel(State::default());
        let counters = Arc::new(Counters::default());
        let task = tokio::spawn(accept(listener, target, seen, Arc::clone(&counters)));
        Ok(Self {
            port,
            state,
            counters,
            task,
        })
    }

    /// Ends every fault; connections that were cut or half closed stay so.
    pub fn pass(&self) {
        self.state.send_modify(|state| {
            *state = State {
                cuts: state.cuts,
                ..State::default()
            }
        });
    }

    /// Every byte of this direction arrives this much later (throughput stays).
    pub fn delay(&self, direction: Direction, delay: Duration) {
        self.way(direction, |way| way.delay = delay);
    }

    /// Nothing of this direction arrives any more; connections stay open. What was swallowed arrives after
    /// [`Self::pass`], as TCP would send it again.
    pub fn black_hole(&self, direction: Direction) {
        self.way(direction, |way| way.hole = true);
    }

    /// The receiver of this direction sees the end of the stream; the other direction stays. Holds for connections
    /// made until [`Self::pass`] too.
    pub fn half_close(&self, direction: Direction) {
        self.way(direction, |way| way.closed = true);
    }

    /// Resets every open connection, at both ends.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    /// New connections are refused until [`Self::pass`]; open ones stay.
    pub fn refuse(&self) {
        self.state.send_modify(|state| state.refuse = true);
    }

    fn way(&self, direction: Direction, change: impl FnOnce(&mut Way)) {
        self.state
            .send_modify(|state| change(&mut state.ways[index(direction)]));
    }

    /// How many connections it has accepted so far.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.counters.accepted.load(Ordering::SeqCst)
    }

    /// How many connections are open now.
    #[must_use]
    pub fn open(&self) -> usize {
        self.counters.open.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn index(direction: Direction) -> usize {
    match direction {
        Direction::ToServer => 0,
        Direction::ToClient => 1,
    }
}

async fn accept(
    first: TcpListener,
    target: u16,
    mut state: watch::Receiver<State>,
    counters: Arc<Counters>,
) {
    let Ok(address) = first.local_addr() else {
        return;
    };
    let mut listener = Some(first);
    let mut connections = JoinSet::new();
    loop {
        let refuse = state.borrow_and_update().refuse;
        if refuse {
            // A closed listener is what makes the kernel refuse.
            listener = None;
        } else if listener.is_none() {
            listener = bind_again(address).await;
        }
        let accepted = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            client = accepted => if let Ok((client, _)) = client {
                counters.accepted.fetch_add(1, Ordering::SeqCst);
                connections.spawn(connection(client, target, state.clone(), Arc::clone(&counters)));
            },
            changed = state.changed() => if changed.is_err() { return },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn bind_again(address: SocketAddr) -> Option<TcpListener> {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return Some(listener),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Counts a connection as open while it lives, however it ends.
struct Open(Arc<Counters>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn connection(
    mut client: TcpStream,
    target: u16,
    mut state: watch::Receiver<State>,
    counters: Arc<Counters>,
) {
    counters.open.fetch_add(1, Ordering::SeqCst);
    let _open = Open(counters);
    let cuts = state.borrow().cuts;
    // Whatever ends this task early must look like a reset; an orderly end has sent its FIN before.
    let _ = client.set_zero_linger();
    let _ = client.set_nodelay(true);
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", target)).await else {
        return;
    };
    let _ = server.set_zero_linger();
    let _ = server.set_nodelay(true);
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let both = async {
        tokio::join!(
            pump(from_client, to_server, Direction::ToServer, state.clone()),
            pump(from_server, to_client, Direction::ToClient, state.clone()),
        )
    };
    let mut cut = state.clone();
    tokio::select! {
        _ = both => {}
        _ = cut.wait_for(|state| state.cuts > cuts) => return,
    }
    // Both sides are done: close in the ordinary way, so that the last bytes are not thrown away by a reset.
    #[expect(
        deprecated,
        reason = "no linger time is set, so closing does not block"
    )]
    {
        let _ = client.set_linger(None);
        let _ = server.set_linger(None);
    }
    let _ = state.borrow_and_update();
}

async fn pump(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    direction: Direction,
    state: watch::Receiver<State>,
) {
    let side = index(direction);
    let (queue, mut queued) = mpsc::channel::<(Instant, Vec<u8>)>(64);
    let mut gate = state.clone();
    let reader = async move {
        let mut buffer = vec![0; 64 << 10];
        loop {
            // Not reading in a black hole lets the sender's buffers fill, as they would.
            if gate.wait_for(|state| !state.ways[side].hole).await.is_err() {
                return;
            }
            match from.read(&mut buffer).await {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    if queue
                        .send((Instant::now(), buffer[..read].to_vec()))
                        .await
                        .is_err()
                    {
                        return;
                    }
                }
            }
        }
    };
    let (mut gate, mut closed) = (state.clone(), state);
    let writer = async move {
        let write = async {
            while let Some((at, bytes)) = queued.recv().await {
                let delay = gate.borrow().ways[side].delay;
                sleep_until(at + delay).await;
                if gate.wait_for(|state| !state.ways[side].hole).await.is_err()
                    || to.write_all(&bytes).await.is_err()
                {
                    return;
                }
            }
        };
        tokio::select! {
            () = write => {}
            _ = closed.wait_for(|state| state.ways[side].closed) => {}
        }
        let _ = to.shutdown().await;
    };
    tokio::join!(reader, writer);
}
