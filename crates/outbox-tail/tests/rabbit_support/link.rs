//! A link between publisher and broker that can be cut, swallow everything, or be slow.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

#[derive(Clone, Copy, Debug, Default)]
struct Mode {
    swallow: bool,
    /// Of what the broker says.
    delay: Duration,
    /// Connections of older numbers are cut.
    cuts: u64,
}

pub struct SlowLink {
    pub port: u16,
    mode: watch::Sender<Mode>,
    accepted: Arc<AtomicUsize>,
    end: CancellationToken,
}

impl SlowLink {
    pub async fn to(broker: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (mode, see) = watch::channel(Mode::default());
        let (accepted, end) = (Arc::new(AtomicUsize::new(0)), CancellationToken::new());
        let (count, stop) = (Arc::clone(&accepted), end.clone());
        tokio::spawn(stop.run_until_cancelled_owned(async move {
            while let Ok((client, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(carry(client, ([127, 0, 0, 1], broker).into(), see.clone()));
            }
        }));
        Self {
            port,
            mode,
            accepted,
            end,
        }
    }

    pub fn cut(&self) {
        self.mode.send_modify(|m| m.cuts += 1);
    }

    pub fn swallow(&self, swallow: bool) {
        self.mode.send_modify(|m| m.swallow = swallow);
    }

    pub fn delay(&self, delay: Duration) {
        self.mode.send_modify(|m| m.delay = delay);
    }

    /// Connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }
}

impl Drop for SlowLink {
    fn drop(&mut self) {
        self.cut();
        self.end.cancel();
    }
}

async fn carry(client: TcpStream, broker: SocketAddr, mut mode: watch::Receiver<Mode>) {
    let born = mode.borrow_and_update().cuts;
    let Ok(server) = TcpStream::connect(broker).await else {
        return;
    };
    let (client_read, client_write) = client.into_split();
    let (server_read, server_write) = server.into_split();
    let (up, down) = (mode.clone(), mode.clone());
    tokio::select! {
        () = pump(client_read, server_write, up, false) => {}
        () = pump(server_read, client_write, down, true) => {}
        _ = mode.wait_for(|m| m.cuts > born) => {}
    }
}

async fn pump(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mode: watch::Receiver<Mode>,
    slow: bool,
) {
    let (queue, mut due) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let read = async {
        let mut buffer = vec![0; 64 * 1024];
        while let Ok(n @ 1..) = from.read(&mut buffer).await {
            let now = *mode.borrow();
            let delay = if slow { now.delay } else { Duration::ZERO };
            if !now.swallow
                && queue
                    .send((Instant::now() + delay, buffer[..n].to_vec()))
                    .is_err()
            {
                return;
            }
        }
    };
    let write = async {
        while let Some((at, bytes)) = due.recv().await {
            tokio::time::sleep_until(at).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = read => {}
        () = write => {}
    }
}
