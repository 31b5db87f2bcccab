//! One TCP connection: HTTP/1.1 with time limits, and an end that loses no answer.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

/// How long a closed connection is read from at most, and how long without anything coming.
const LINGER: Duration = Duration::from_secs(30);
const LINGER_IDLE: Duration = Duration::from_secs(2);
/// The same during shutdown, which should not wait for clients that do not hang up.
const LINGER_DRAINING: Duration = Duration::from_millis(200);

/// Time limits of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// For the head of a request, and between requests.
    pub(crate) read: Duration,
    /// For a client that does not read, until some bytes go out.
    pub(crate) write: Duration,
}

/// Serves a connection, through TLS where the server speaks it.
pub(crate) async fn serve(
    stream: TcpStream,
    tls: Option<TlsAcceptor>,
    router: Router,
    limits: Limits,
    mut draining: watch::Receiver<bool>,
) {
    // Tokens are small and urgent.
    let _ = stream.set_nodelay(true);
    let Some(tls) = tls else { return serve_http(stream, router, limits, draining).await };
    let greeted = tokio::select! {
        greeted = timeout(limits.read, tls.accept(stream)) => greeted,
        _ = draining.wait_for(|draining| *draining) => return,
    };
    match greeted {
        Ok(Ok(stream)) => serve_http(stream, router, limits, draining).await,
        Ok(Err(error)) => tracing::debug!(%error, "no TLS came about"),
        Err(_) => tracing::debug!("no TLS came about in time"),
    }
}

/// Serves requests until the client closes, a limit is passed, or `draining` becomes true and the request in hand
/// is answered.
async fn serve_http<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
    router: Router,
    limits: Limits,
    mut draining: watch::Receiver<bool>,
) {
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let router = router.clone();
        Box::pin(async move { router.oneshot(request.map(Body::new)).await })
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(limits.read);
    // Who comes during shutdown gets one answer; a connection that is told to end before its first request gets none.
    let mut told = *draining.borrow();
    builder.keep_alive(!told);
    let stream = WriteLimit { stream, limit: limits.write, waiting: None };
    let mut connection = builder.serve_connection(TokioIo::new(stream), service);
    let result = loop {
        tokio::select! {
            result = std::future::poll_fn(|context| connection.poll_without_shutdown(context)) => break result,
            _ = draining.wait_for(|draining| *draining), if !told => {
                told = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
        }
    };
    if let Err(error) = &result {
        tracing::debug!(%error, "connection ended");
    }
    linger(connection.into_parts().io.into_inner().stream, told).await;
}

/// Closes in order: says that nothing more comes, then reads what the client still sends. Closing with unread
/// bytes would reset the connection, and a client in the middle of a large body would never see why it was refused.
async fn linger<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, draining: bool) {
    if stream.shutdown().await.is_err() {
        return;
    }
    let (idle, whole) = if draining { (LINGER_DRAINING, LINGER_DRAINING) } else { (LINGER_IDLE, LINGER) };
    let mut discarded = vec![0; 64 << 10];
    let drain = async { while let Ok(Ok(1..)) = timeout(idle, stream.read(&mut discarded)).await {} };
    let _ = timeout(whole, drain).await;
}

/// Fails a write that makes no progress for too long.
struct WriteLimit<S> {
    stream: S,
    limit: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteLimit<S> {
    /// Passes a result on, or an error when it has been pending for too long.
    fn limited<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waiting = None;
            return result;
        }
        let limit = self.limit;
        let sleep =
            self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + limit)));
        ready!(pin!(sleep).poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.limited(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        self.limited(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
