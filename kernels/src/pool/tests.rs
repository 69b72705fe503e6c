//! Every task once, panics passed on, no caller in another's way, and an end.

use std::sync::Barrier;

use super::*;

/// How often each of `tasks` tasks ran.
fn count(pool: &Pool, tasks: usize) -> Vec<usize> {
    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, &|task| {
        counts[task].fetch_add(1, Ordering::Relaxed);
    });
    counts.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn every_task_runs_once() {
    for workers in [0, 1, 3] {
        let pool = Pool::new(workers);
        assert_eq!(pool.threads(), workers + 1);
        for round in 0..200 {
            let tasks = round % 23;
            assert_eq!(count(&pool, tasks), vec![1; tasks]);
        }
    }
}

#[test]
fn all_threads_take_part() {
    let pool = Pool::new(2);
    let barrier = Barrier::new(3);
    // A task ends when three have begun: only three threads can do that.
    for _ in 0..50 {
        pool.run(3, &|_| {
            barrier.wait();
        });
    }
}

#[test]
fn a_panic_is_passed_on_and_the_pool_goes_on() {
    let pool = Pool::new(1);
    let caller = thread::current().id();
    for panics_on_caller in [true, false] {
        let barrier = Barrier::new(2);
        let run = catch_unwind(AssertUnwindSafe(|| {
            pool.run(2, &|_| {
                barrier.wait();
                assert!((thread::current().id() == caller) != panics_on_caller, "broken task");
            });
        }));
        let message = run.unwrap_err().downcast::<&str>().unwrap();
        assert_eq!(*message, "broken task");
        assert_eq!(count(&pool, 9), vec![1; 9]);
    }
}

#[test]
fn nested_and_concurrent_calls_run_on_their_caller() {
    let pool = Pool::new(1);
    pool.run(4, &|_| assert_eq!(count(&pool, 5), vec![1; 5]));
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for tasks in 0..100 {
                    assert_eq!(count(&pool, tasks), vec![1; tasks]);
                }
            });
        }
    });
}

#[test]
fn dropping_it_ends_its_threads() {
    let pool = Pool::new(2);
    count(&pool, 10);
    let shared = Arc::downgrade(&pool.shared);
    drop(pool);
    assert!(shared.upgrade().is_none());
}
