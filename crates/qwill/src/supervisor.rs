//! Telling systemd how far the start is: one datagram to the socket that it names, as `sd_notify(3)` describes.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// What a supervisor wants to know.
#[derive(Debug, Clone, Copy)]
pub(crate) enum State {
    /// Requests are taken.
    Ready,
    /// The end has begun; it lasts as long as the drain does.
    Stopping,
}

/// Tells the supervisor, where there is one. A failure is worth a warning and no more: the server serves all the same.
pub(crate) fn notify(state: State) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET").filter(|socket| !socket.is_empty()) else { return };
    let message = match state {
        State::Ready => "READY=1\nSTATUS=ready\n",
        State::Stopping => "STOPPING=1\nSTATUS=draining\n",
    };
    if let Err(error) = send(socket.as_bytes(), message) {
        tracing::warn!(?socket, %error, "the supervisor cannot be told about {state:?}");
    }
}

/// A name that begins with `@` is in the abstract namespace.
fn send(socket: &[u8], message: &str) -> std::io::Result<()> {
    let address = match socket.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(socket))?,
    };
    UnixDatagram::unbound()?.send_to_addr(message.as_bytes(), &address).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(by: &UnixDatagram) -> String {
        let mut buffer = [0; 256];
        let length = by.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    }

    #[test]
    fn a_socket_has_a_path_or_an_abstract_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let by_path = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str().as_bytes(), "READY=1\n").unwrap();
        assert_eq!(received(&by_path), "READY=1\n");

        let name = format!("qwill-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let abstract_one = UnixDatagram::bind_addr(&address).unwrap();
        send(format!("@{name}").as_bytes(), "STOPPING=1\n").unwrap();
        assert_eq!(received(&abstract_one), "STOPPING=1\n");
    }

    #[test]
    fn a_socket_that_nobody_reads_is_an_error() {
        assert!(send(b"/no/such/socket", "READY=1\n").is_err());
    }
}
