//! Who joins, drains and comes back, in whichever order.

use keyway_core::{pick::Policy, waiting_room::RoomRules};
use keyway_wire::block_hash::HashKey;

use super::*;
use crate::{
    clock::Clock,
    config::WorkerTable,
    fleet::{Fleet, ejection::Ejections},
    machine::descriptors::Shortages,
    net::Connector,
    prompt::request::KeyerConfig,
};

fn members() -> Arc<Members> {
    let clock = Clock::start();
    let metrics = Arc::new(Metrics::new().unwrap());
    let fleet = Arc::new(Fleet::new(&[], Duration::ZERO, &Ejections::new(clock, None)));
    let keyer = KeyerConfig { key: HashKey::new(1), block_bytes: std::num::NonZeroUsize::new(64).unwrap() };
    let router = Router::new(fleet, Arc::clone(&metrics), clock, Policy::Prefix, keyer, 1 << 20);
    let shortages = Shortages::new(metrics.lifecycle.shortages.clone());
    let upstream = Upstream::new(Connector::new(Duration::from_secs(1)), shortages);
    Members::new(Arc::new(router.with_room(Some(RoomRules::default()))), upstream, metrics, false)
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_is_taken_back_before_it_has_drained_stays() {
    let members = members();
    assert!(members.join(&"http://127.0.0.1:1".parse().unwrap(), Source::Static));
    for _ in 0..2 {
        assert!(members.drain("127.0.0.1:1"));
        assert!(members.undrain("127.0.0.1:1"));
    }
    clock::sleep(10 * DRAIN_LOOK).await;
    let own = members.of(Source::Static);
    assert_eq!((own.len(), members.router.fleet().all().len()), (1, 1));
    assert!(own[0].state() != State::Draining);
    let tasks = members.all.lock().values().map(|member| member.tasks.len()).sum::<usize>();
    assert!(tasks > 0, "it is watched");
    // One that is not taken back ends.
    assert!(members.drain("127.0.0.1:1"));
    clock::sleep(10 * DRAIN_LOOK).await;
    assert!(members.all.lock().values().all(|member| member.tasks.is_empty()));
    members.stop();
}

fn names(members: &Arc<Members>) -> Vec<String> {
    let stay = members.of(Source::Static).into_iter().filter(|worker| worker.state() != State::Draining);
    let mut names: Vec<_> = stay.map(|worker| worker.name.clone()).collect();
    names.sort();
    names
}

#[tokio::test(start_paused = true)]
async fn engines_that_are_found_take_the_place_of_their_address() {
    let members = members();
    let list = [Listed::from("http://127.0.0.1:1".parse::<WorkerConfig>().unwrap())];
    members.set(Source::Static, &list);
    let worker = members.of(Source::Static).remove(0);
    let ranks = ["127.0.0.1:1@0", "127.0.0.1:1@1"];
    let of = Arc::clone(&members);
    let found = tokio::spawn(async move { of.has_engines(&worker, 2).await });
    clock::sleep(Duration::from_secs(1)).await;
    // None of the engines serves yet, so what was there does, whatever a list says meanwhile.
    members.set(Source::Static, &list);
    assert_eq!(names(&members), ["127.0.0.1:1", ranks[0], ranks[1]]);
    found.await.unwrap();
    assert_eq!(names(&members), ranks);
    members.set(Source::Static, &list);
    assert_eq!(names(&members), ranks);
    assert!(!members.join(&list[0].config, Source::Admin), "it is there, in two parts");
    // An operator may name all of it.
    assert!(members.drain("127.0.0.1:1") && members.undrain("127.0.0.1:1"));
    clock::sleep(10 * DRAIN_LOOK).await;
    assert_eq!(names(&members), ranks);
    // It was started again with three, and then with one.
    for (engines, want) in
        [(3, &["127.0.0.1:1@0", "127.0.0.1:1@1", "127.0.0.1:1@2"][..]), (1, &["127.0.0.1:1"][..])]
    {
        let of = members.of(Source::Static);
        let worker = of.iter().find(|worker| worker.name == ranks[0]).unwrap();
        members.has_engines(worker, engines).await;
        clock::sleep(10 * DRAIN_LOOK).await;
        assert_eq!(names(&members), want);
    }
    assert!(members.splits.lock().is_empty());
    members.stop();
}

#[tokio::test(start_paused = true)]
async fn what_is_known_of_an_address_goes_with_its_last_engine() {
    let members = members();
    let list = [Listed::from("http://127.0.0.1:1".parse::<WorkerConfig>().unwrap())];
    members.set(Source::Static, &list);
    let worker = Arc::clone(&members.of(Source::Static)[0]);
    members.has_engines(&worker, 2).await;
    clock::sleep(10 * DRAIN_LOOK).await;
    members.set(Source::Static, &[]);
    clock::sleep(10 * DRAIN_LOOK).await;
    assert!(members.of(Source::Static).is_empty() && members.splits.lock().is_empty());
    members.set(Source::Static, &list);
    assert_eq!(names(&members), ["127.0.0.1:1"]);
    members.stop();
}

#[tokio::test(start_paused = true)]
async fn an_operator_may_say_that_engines_are_one_worker() {
    let members = members();
    let table = |size| WorkerTable { data_parallel_size: size, ..WorkerTable::of("http://127.0.0.1:1") };
    let list =
        |size| WorkerConfig::all_of(&table(size)).unwrap().into_iter().map(Listed::from).collect::<Vec<_>>();
    for (size, want) in [(Some(1), &["127.0.0.1:1"][..]), (Some(2), &["127.0.0.1:1@0", "127.0.0.1:1@1"])] {
        members.set(Source::Static, &list(None));
        let worker = members.of(Source::Static).remove(0);
        members.has_engines(&worker, 2).await;
        clock::sleep(10 * DRAIN_LOOK).await;
        members.set(Source::Static, &list(size));
        clock::sleep(10 * DRAIN_LOOK).await;
        assert_eq!(names(&members), want);
        members.set(Source::Static, &[]);
        clock::sleep(10 * DRAIN_LOOK).await;
    }
    members.stop();
}

#[test]
fn an_operator_s_number_is_not_doubted() {
    let table = |size| WorkerTable { data_parallel_size: size, ..WorkerTable::of("http://127.0.0.1:1") };
    let finds = |size| {
        WorkerConfig::all_of(&table(size)).unwrap().iter().map(|one| one.finds_ranks).collect::<Vec<_>>()
    };
    assert_eq!((finds(None), finds(Some(1)), finds(Some(2))), (vec![true], vec![false], vec![false, false]));
}
