//! Bytes between the processes of a run: a star of TCP connections around the first rank. Knows
//! nothing of what the bytes mean.

use std::collections::BTreeMap;
use std::io::ErrorKind::{TimedOut, WouldBlock};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{Place, WorldError};

/// How long processes wait for each other at the start: images are pulled, models copied.
const JOIN: Duration = Duration::from_secs(600);
/// How long one may be busy with something else between exchanges: reading a large data set, or
/// measuring. Who hangs is ended by its own watch, and who is gone is silent.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// Time between signs of life.
pub(super) const BEAT: Duration = Duration::from_secs(10);
/// Who gives no sign of life for so long is gone, with its machine or the way to it: a connection
/// that nobody closes does not end by itself.
pub(super) const SILENCE: Duration = Duration::from_secs(120);
/// Time between attempts to reach the first process.
const RETRY: Duration = Duration::from_millis(200);
/// Largest message: bounds what a stranger's bytes can make this process allocate.
const LARGEST: u64 = 1 << 36;
/// Largest greeting.
const LARGEST_HELLO: u64 = 1 << 16;
/// Sent by a process that ends as it should.
const FINISHED: u8 = b'F';
/// Sent now and then by one that lives.
const ALIVE: u8 = b'A';
/// Tells these processes from strangers.
const PROTOCOL: &str = "aerie-world-2";

/// First message of every connection.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Hello {
    protocol: String,
    rank: usize,
    size: usize,
    digest: String,
    /// Whether the connection only shows that the process lives.
    watch: bool,
}

/// Connections for data: to every other rank on the first, to the first on the others.
#[derive(Debug)]
pub(super) struct Channel {
    rank: usize,
    others: Vec<(usize, TcpStream)>,
}

/// A rank and a connection to it.
pub(super) type Peer = (usize, TcpStream);

/// Connects all processes: the channel, and the connections to be watched.
pub(super) fn connect(place: &Place, digest: &str) -> Result<(Channel, Vec<Peer>), WorldError> {
    let (others, watched) = match place.rank {
        0 => accept(place, digest)?,
        _ => (vec![(0, reach(place, digest, false)?)], vec![(0, reach(place, digest, true)?)]),
    };
    let mut channel = Channel { rank: place.rank, others };
    // Nobody starts before all are there.
    channel.exchange(Vec::new())?;
    Ok((channel, watched))
}

fn accept(place: &Place, digest: &str) -> Result<(Vec<Peer>, Vec<Peer>), WorldError> {
    let port = place.master.1;
    let wrong = |source| WorldError::Listen { port, source };
    let listener = TcpListener::bind(("0.0.0.0", port)).map_err(wrong)?;
    listener.set_nonblocking(true).map_err(wrong)?;
    let (others, seconds) = (place.size - 1, JOIN.as_secs());
    tracing::info!("waiting up to {seconds} s for {others} more processes at port {port}");
    let end = Instant::now() + JOIN;
    let (mut data, mut watched) = (BTreeMap::new(), BTreeMap::new());
    // Kept open: a process that sees its own replaced ends, and could not be told from a dead one.
    let mut replaced = Vec::new();
    while data.len() + watched.len() < 2 * (place.size - 1) {
        match listener.accept() {
            Ok((stream, from)) => match greet(&stream) {
                Ok(hello) if hello.protocol == PROTOCOL => {
                    same(&hello, place, digest)?;
                    let side = if hello.watch { &mut watched } else { &mut data };
                    let before = side.insert(hello.rank, stream);
                    // One that ended and was started again may come twice. It may have left words
                    // in the connection for data.
                    if hello.watch && before.as_ref().is_some_and(is_open) {
                        return Err(WorldError::Twice { rank: hello.rank });
                    }
                    replaced.extend(before);
                }
                _ => tracing::warn!("{from} is none of this run's processes"),
            },
            Err(error) if error.kind() == WouldBlock && Instant::now() < end => {
                std::thread::sleep(RETRY / 10);
            }
            Err(error) if error.kind() == WouldBlock => {
                let missing: Vec<_> =
                    (1..place.size).filter(|rank| !watched.contains_key(rank)).collect();
                return Err(WorldError::Missing {
                    found: place.size - missing.len(),
                    expected: place.size,
                    missing,
                    seconds: JOIN.as_secs(),
                });
            }
            Err(error) => return Err(wrong(error)),
        }
    }
    Ok((data.into_iter().collect(), watched.into_iter().collect()))
}

/// Whether the other end of a connection, which has said nothing more, has not closed it.
fn is_open(stream: &TcpStream) -> bool {
    let peeked = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    peeked.is_err_and(|error| error.kind() == WouldBlock)
}

/// Reads the greeting of a process that may be a stranger.
fn greet(stream: &TcpStream) -> io::Result<Hello> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let hello = serde_json::from_slice(&receive(stream, LARGEST_HELLO)?)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    Ok(hello)
}

fn same(hello: &Hello, place: &Place, digest: &str) -> Result<(), WorldError> {
    let different = |what, theirs: String, ours: String| {
        Err(WorldError::Different { what, rank: hello.rank, theirs, ours })
    };
    if hello.size != place.size {
        return different("WORLD_SIZE", hello.size.to_string(), place.size.to_string());
    }
    if hello.digest != digest {
        let (theirs, ours) = (own_lines(&hello.digest, digest), own_lines(digest, &hello.digest));
        return different("the configuration", theirs, ours);
    }
    if hello.rank == 0 || hello.rank >= place.size {
        let ours = format!("one of 1 to {}", place.size - 1);
        return different("RANK", hello.rank.to_string(), ours);
    }
    Ok(())
}

/// Lines of a text that another one does not have.
fn own_lines(text: &str, other: &str) -> String {
    let own = text.lines().filter(|line| !other.lines().any(|theirs| theirs == *line));
    own.collect::<Vec<_>>().join("; ")
}

fn reach(place: &Place, digest: &str, watch: bool) -> Result<TcpStream, WorldError> {
    let (host, port) = &place.master;
    let (start, mut told) = (Instant::now(), false);
    let stream = loop {
        match TcpStream::connect((host.as_str(), *port)) {
            Ok(stream) => break stream,
            // It was there a moment ago, and has ended since: its own log says why.
            Err(source) if watch => return Err(WorldError::lost(0)(source)),
            Err(source) if start.elapsed() > JOIN => {
                let master = format!("{host}:{port}");
                return Err(WorldError::Connect { master, seconds: JOIN.as_secs(), source });
            }
            Err(source) => {
                if !std::mem::replace(&mut told, true) {
                    let seconds = JOIN.as_secs();
                    tracing::info!(
                        "waiting up to {seconds} s for rank 0 at {host}:{port}: {source}"
                    );
                }
                std::thread::sleep(RETRY);
            }
        }
    };
    let hello = Hello {
        protocol: PROTOCOL.to_owned(),
        rank: place.rank,
        size: place.size,
        digest: digest.to_owned(),
        watch,
    };
    let greeted = serde_json::to_vec(&hello).map_err(io::Error::from).and_then(|hello| {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        send(&stream, &hello)
    });
    greeted.map_err(WorldError::lost(0))?;
    Ok(stream)
}

impl Channel {
    /// Everybody's bytes, by rank, on everybody.
    pub(super) fn exchange(&mut self, own: Vec<u8>) -> Result<Vec<Vec<u8>>, WorldError> {
        if self.rank != 0 {
            let Some((_, first)) = self.others.first() else { return Ok(vec![own]) };
            let lost = WorldError::lost(0);
            send(first, &own).map_err(&lost)?;
            let ranks = read_length(first).map_err(&lost)?;
            return (0..ranks).map(|_| receive(first, LARGEST).map_err(&lost)).collect();
        }
        let mut all = vec![own];
        for (rank, stream) in &self.others {
            all.push(receive(stream, LARGEST).map_err(WorldError::lost(*rank))?);
        }
        for (rank, stream) in &self.others {
            let sent = write_length(stream, all.len() as u64)
                .and_then(|()| all.iter().try_for_each(|bytes| send(stream, bytes)));
            sent.map_err(WorldError::lost(*rank))?;
        }
        Ok(all)
    }
}

/// Returns when the process has said that it ends; an error when it ends without, or is silent for
/// longer than `silence`.
pub(super) fn wait_for_end((rank, stream): Peer, silence: Duration) -> Result<(), WorldError> {
    let lost = WorldError::lost(rank);
    stream.set_read_timeout(Some(silence)).map_err(&lost)?;
    loop {
        let mut said = [0];
        match (&stream).read_exact(&mut said).map(|()| said) {
            Ok([ALIVE]) => {}
            Ok([FINISHED]) => return Ok(()),
            Ok(_) => return Err(lost(io::ErrorKind::InvalidData.into())),
            // What a timeout is called differs between systems.
            Err(error) if matches!(error.kind(), WouldBlock | TimedOut) => {
                let seconds = silence.as_secs_f64();
                let silent = format!("no sign of life for {seconds} s");
                return Err(lost(io::Error::new(TimedOut, silent)));
            }
            Err(error) => return Err(lost(error)),
        }
    }
}

/// Shows every `interval` that this process lives, until the other end of `stop` is dropped.
pub(super) fn beat(streams: &[TcpStream], interval: Duration, stop: &Receiver<()>) {
    while stop.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
        for mut stream in streams {
            // The watch over this connection tells of its end.
            let _ = stream.write_all(&[ALIVE]);
        }
    }
}

/// Says that this process ends as it should.
pub(super) fn say_finished(mut stream: &TcpStream) {
    // Who is gone already need not be told.
    let _ = stream.write_all(&[FINISHED]);
}

fn write_length(mut stream: &TcpStream, length: u64) -> io::Result<()> {
    stream.write_all(&length.to_le_bytes())
}

fn read_length(mut stream: &TcpStream) -> io::Result<u64> {
    let mut length = [0; 8];
    stream.read_exact(&mut length)?;
    Ok(u64::from_le_bytes(length))
}

fn send(mut stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    write_length(stream, bytes.len() as u64)?;
    stream.write_all(bytes)
}

fn receive(stream: &TcpStream, largest: u64) -> io::Result<Vec<u8>> {
    let length = read_length(stream)?;
    if length > largest {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{length} bytes announced"),
        ));
    }
    let mut bytes = Vec::new();
    stream.take(length).read_to_end(&mut bytes)?;
    match bytes.len() as u64 == length {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}
