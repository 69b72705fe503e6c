//! Who joins, drains and comes back, in whichever order.

use keyway_core::{pick::Policy, waiting_room::RoomRules};
use keyway_wire::block_hash::HashKey;

use super::*;
use crate::{
    clock::Clock,
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
