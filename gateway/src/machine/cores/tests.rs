//! Which thread serves what: new connections where there is least, streams beside their connection while that
//! is fair.

use std::{sync::mpsc, time::Duration};

use super::*;

/// What one runs until it is dropped.
type Running = oneshot::Sender<()>;

/// A task that says where it runs and stays until its other half is dropped.
fn task() -> (Running, mpsc::Receiver<Option<usize>>, impl Future<Output = ()> + Send) {
    let (end, ended) = oneshot::channel::<()>();
    let (say, said) = mpsc::channel();
    let stays = async move {
        say.send(HERE.get()).unwrap();
        let _ = ended.await;
    };
    (end, said, stays)
}

#[tokio::test]
async fn a_thread_that_something_holds_up_is_found() {
    let cores = Cores::start(3).unwrap();
    assert_eq!(cores.stuck(Duration::from_secs(60)).await, None);
    let (free, held) = mpsc::channel::<()>();
    let (begun, begins) = mpsc::channel();
    cores.run_at(1, async move {
        begun.send(()).unwrap();
        // As no task may.
        let _ = held.recv();
    });
    begins.recv().unwrap();
    assert_eq!(cores.stuck(Duration::from_millis(50)).await, Some(1));
    drop(free);
    assert_eq!(cores.stuck(Duration::from_secs(60)).await, None);
}

fn heard(said: &mpsc::Receiver<Option<usize>>) -> usize {
    said.recv_timeout(Duration::from_secs(60)).unwrap().expect("a core's thread")
}

fn connect(cores: &Arc<Cores>) -> (Running, usize) {
    let (running, said, stays) = task();
    cores.run(stays);
    (running, heard(&said))
}

/// Connections and streams of each core, once there are so many in all.
fn tasks(cores: &Cores, sum: usize) -> Vec<usize> {
    loop {
        let tasks: Vec<_> = cores.0.iter().map(Core::tasks).collect();
        if tasks.iter().sum::<usize>() == sum {
            return tasks;
        }
        thread::yield_now();
    }
}

#[test]
fn a_connection_goes_where_there_are_fewest() {
    let cores = Cores::start(3).unwrap();
    let mut open: Vec<_> = (0..6).map(|_| connect(&cores)).collect();
    assert_eq!(open.iter().map(|(_, core)| *core).collect::<Vec<_>>(), [0, 1, 2, 0, 1, 2]);
    open.retain(|(_, core)| *core != 1);
    assert_eq!(tasks(&cores, 4), [2, 0, 2]);
    assert_eq!((connect(&cores).1, HERE.get()), (1, None));
}

#[test]
fn streams_stay_beside_their_connection_until_it_has_much_more_to_do() {
    let cores = Cores::start(2).unwrap();
    let (_other, at) = connect(&cores);
    assert_eq!(at, 0);
    let (say, said) = mpsc::channel();
    let (end, ended) = oneshot::channel::<()>();
    let there = Arc::clone(&cores);
    cores.run(async move {
        let streams: Vec<_> = (0..CORE_KEEPS_STREAMS + 3)
            .map(|_| {
                let (running, at, stays) = task();
                there.run_near(stays);
                (running, at)
            })
            .collect();
        say.send(streams).unwrap();
        let _ = ended.await;
    });
    let streams = said.recv_timeout(Duration::from_secs(60)).unwrap();
    let at: Vec<_> = streams.iter().map(|(_, at)| heard(at)).collect();
    // The connection is one of its core's, the other core has one as well.
    let (beside, elsewhere) = at.split_at(CORE_KEEPS_STREAMS + 1);
    assert!(beside.iter().all(|at| *at == 1) && elsewhere == [0, 1], "{at:?}");
    drop((streams, end));
    assert_eq!(tasks(&cores, 1), [1, 0]);
}

#[test]
fn each_core_has_its_own_and_other_threads_share_one() {
    let lists = Arc::new(PerCore { cores: Box::new([Line(1), Line(2)]), elsewhere: Line(0) });
    assert_eq!((*lists.here(), lists.all().sum::<i32>()), (0, 3));
    let cores = Cores::start(3).unwrap();
    let (say, said) = mpsc::channel();
    for core in 0..3 {
        let (lists, say) = (Arc::clone(&lists), say.clone());
        cores.run_at(core, async move { say.send((core, *lists.here())).unwrap() });
    }
    let mut here: Vec<_> = said.iter().take(3).collect();
    here.sort_unstable();
    assert_eq!(here, [(0, 1), (1, 2), (2, 0)], "one that came later shares too");
}

#[test]
fn threads_end_with_the_last_who_has_them() {
    let cores = Cores::start(1).unwrap();
    let (running, _) = connect(&cores);
    let runtime = cores.0[0].runtime.clone();
    drop(cores);
    drop(running);
    while !runtime.spawn(async {}).is_finished() {
        thread::yield_now();
    }
    // Its own task has ended, and so has its runtime: what is spawned now is dropped.
    loop {
        let (said, hears) = mpsc::channel::<()>();
        runtime.spawn(async move {
            let _said = said;
            std::future::pending::<()>().await;
        });
        if hears.recv_timeout(Duration::from_millis(10)) == Err(mpsc::RecvTimeoutError::Disconnected) {
            break;
        }
    }
}
