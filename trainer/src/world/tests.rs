//! Ranks as threads of this process: sums, strangers, processes of another run, a loss.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use super::*;

#[path = "../../tests/support/port.rs"]
mod port;

use port::free_port;

fn place(rank: usize, size: usize, port: u16) -> Place {
    Place { rank, size, local_rank: rank, master: ("127.0.0.1".to_owned(), port) }
}

fn nobody_is_lost(error: &WorldError) {
    panic!("{error}");
}

/// Runs `work` as every rank of `size`.
fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let start = |rank| {
            let work = &work;
            scope.spawn(move || {
                work(World::join(place(rank, size, port), "same", nobody_is_lost).unwrap())
            })
        };
        let threads: Vec<_> = (0..size).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_has_the_same_sum_bit_for_bit() {
    // Values whose sum depends on the order.
    let value = |rank: usize| [1e16, 1.0, -1e16, 3.0][rank];
    let sums = ranks(4, |world| {
        let mut values = [value(world.rank()), world.rank() as f64];
        for _ in 0..50 {
            values = [value(world.rank()), world.rank() as f64];
            world.sum(&mut values).unwrap();
        }
        world.finish();
        values
    });
    let expected = (0..4).fold(0.0, |sum, rank| sum + value(rank));
    assert_eq!(sums, vec![[expected, 6.0]; 4]);
}

#[test]
fn large_messages_and_empty_ones_cross() {
    let seen = ranks(3, |world| {
        let all = world.exchange(vec![world.rank() as u8; world.rank() << 20]).unwrap();
        assert_eq!(world.from_first(world.rank() as f64 + 5.0).unwrap(), 5.0);
        world.finish();
        all.iter().map(|bytes| (bytes.len(), bytes.first().copied())).collect::<Vec<_>>()
    });
    assert_eq!(seen, vec![vec![(0, None), (1 << 20, Some(1)), (2 << 20, Some(2))]; 3]);
}

#[test]
fn strangers_are_ignored_and_other_runs_refused() {
    let port = free_port();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| World::join(place(0, 2, port), "x = 1\nours", nobody_is_lost));
        let mut stranger = loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                break stream;
            }
        };
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        drop(stranger);
        let other = scope.spawn(|| World::join(place(1, 2, port), "x = 1\ntheirs", nobody_is_lost));
        let error = first.join().unwrap().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("rank 1 is theirs, here ours"), "{text}");
        assert_eq!(error.exit_code(), 78);
        assert_eq!(other.join().unwrap().unwrap_err().exit_code(), 75);
    });
}

#[test]
fn two_processes_of_the_same_rank_are_named() {
    let port = free_port();
    std::thread::scope(|scope| {
        let join = |rank| scope.spawn(move || World::join(place(rank, 3, port), "same", |_| ()));
        let processes = [0, 1, 1].map(join);
        let [first, others @ ..] = processes.map(|process| process.join().unwrap().unwrap_err());
        assert!(matches!(first, WorldError::Twice { rank: 1 }), "{first}");
        assert_eq!((first.exit_code(), others.map(|other| other.exit_code())), (78, [75, 75]));
    });
}

/// One that was there, was killed and is started again before all others have come.
#[test]
fn a_process_may_come_again_after_its_end() {
    let port = free_port();
    // In the order in which they are made, which is that in which the first process sees them.
    let connected = |watch: bool| {
        let mut stream = loop {
            if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
                break stream;
            }
        };
        let hello = serde_json::json!({
            "protocol": "aerie-world-2", "rank": 1, "size": 3, "digest": "same", "watch": watch
        });
        let hello = hello.to_string();
        stream.write_all(&(hello.len() as u64).to_le_bytes()).unwrap();
        stream.write_all(hello.as_bytes()).unwrap();
        // Its first word to the others.
        if !watch {
            stream.write_all(&[0; 8]).unwrap();
        }
        stream
    };
    std::thread::scope(|scope| {
        let join = |rank| scope.spawn(move || World::join(place(rank, 3, port), "same", |_| ()));
        let first = join(0);
        drop([false, true].map(connected));
        let again = [false, true].map(connected);
        let worlds = [first, join(2)].map(|process| process.join().unwrap().unwrap());
        drop(again);
        worlds.iter().for_each(World::finish);
    });
}

static LOST: Mutex<Option<Sender<String>>> = Mutex::new(None);

fn tell(error: &WorldError) {
    let sender = LOST.lock().unwrap();
    sender.as_ref().unwrap().send(error.to_string()).unwrap();
}

#[test]
fn the_loss_of_one_process_is_told_to_the_others() {
    let (sender, lost) = channel();
    *LOST.lock().unwrap() = Some(sender);
    let port = free_port();
    std::thread::scope(|scope| {
        let join = |rank| move || World::join(place(rank, 2, port), "same", tell).unwrap();
        let (first, second) = (scope.spawn(join(0)), scope.spawn(join(1)));
        let (first, second) = (first.join().unwrap(), second.join().unwrap());
        drop(second);
        let said = lost.recv().unwrap();
        assert!(said.contains("rank 1 is gone"), "{said}");
        assert_eq!(first.exchange(Vec::new()).unwrap_err().exit_code(), 75);
    });
}

/// Two ends of a connection.
fn pair() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [one, listener.accept().unwrap().0]
}

#[test]
fn a_process_whose_connection_stays_open_and_silent_is_lost() {
    let [mut theirs, ours] = pair();
    theirs.write_all(b"AAA").unwrap();
    let error = channel::wait_for_end((3, ours), Duration::from_millis(50)).unwrap_err();
    assert!(matches!(&error, WorldError::Lost { rank: 3, .. }), "{error}");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("no sign of life for 0.05 s"), "{source}");
    assert_eq!(error.exit_code(), 75);
}

#[test]
fn signs_of_life_go_on_until_the_end_and_are_no_end() {
    let [theirs, ours] = pair();
    let last_word = theirs.try_clone().unwrap();
    let (beating, stop) = channel();
    let beats = std::thread::spawn(move || {
        channel::beat(&[theirs], Duration::from_millis(1), &stop);
    });
    let mut some = [0; 3];
    (&ours).read_exact(&mut some).unwrap();
    assert_eq!(&some, b"AAA");
    drop(beating);
    beats.join().unwrap();
    channel::say_finished(&last_word);
    channel::wait_for_end((1, ours), Duration::from_secs(60)).unwrap();
}
