//! Which models a fleet is known to have, and to lack, while its workers come and go.

use super::*;
use crate::clock::Clock;

const NOW: Duration = Duration::from_secs(100);

/// What is known of a worker.
#[derive(Clone, Copy)]
enum Is {
    /// Never heard of since it joined.
    Joining,
    /// Up, and lists this.
    Up(&'static str),
    /// Up, and says nothing of its models.
    UpUnknown,
    /// Was up, and listed this then.
    Down(&'static str),
    /// Not up yet; configured to serve this.
    JoiningFor(&'static str),
}

fn fleet(workers: &[Is]) -> Fleet {
    let fleet = Fleet::new(&[], NOW, &Ejections::new(Clock::start(), None));
    for (at, is) in workers.iter().enumerate() {
        let mut config: WorkerConfig = format!("http://w:{}", at + 1).parse().unwrap();
        if let Is::JoiningFor(model) = is {
            config.model = Some((*model).to_owned());
        }
        let worker = fleet.add(&config, NOW);
        if let Is::Up(id) | Is::Down(id) = is {
            let json = RawValue::from_string(format!("{{\"id\":{id:?}}}")).unwrap();
            worker.set_models(vec![Model {
                id: (*id).to_owned(),
                parent: None,
                json,
                context: None,
                numerics_id: None,
                kv_source_port: None,
            }]);
        }
        if matches!(is, Is::Up(_) | Is::UpUnknown | Is::Down(_)) {
            worker.with_health(|health| health.on_probe(true, NOW));
        }
        if matches!(is, Is::Down(_)) {
            worker.connect_failed(NOW);
        }
    }
    fleet
}

#[test]
fn a_mistyped_name_is_known_to_be_one_while_others_join_and_a_missing_worker_s_model_is_not() {
    use Is::{Down, Joining, JoiningFor, Up, UpUnknown};
    for (workers, lacks, why) in [
        (&[][..], false, "an empty fleet may be one that starts"),
        (&[Joining], false, "nobody has said anything"),
        (&[Joining, Joining], false, "nobody has said anything"),
        (&[Up("other")], true, "all that are there are known"),
        (&[Up("asked")], false, "it is there"),
        (&[Up("other"), Joining], true, "who starts is no reason to believe in it"),
        (&[Up("other"), Joining, Joining, Up("third")], true, "nor are several"),
        (&[Up("other"), UpUnknown], false, "who is up and says nothing may have it"),
        (&[Up("other"), Down("asked")], false, "its worker is down"),
        (&[Up("other"), Down("asked"), Joining], false, "its worker is down"),
        (&[Up("other"), JoiningFor("asked")], false, "it is configured"),
        (&[Up("other"), JoiningFor("third")], true, "another is configured"),
        (&[JoiningFor("other")], true, "no other can come"),
        (&[Down("other")], true, "nobody else is listed"),
        (&[Down("other"), Joining], false, "nobody is up, and who joins may have it"),
    ] {
        assert_eq!(fleet(workers).lacks("asked"), lacks, "{why}");
    }
}

#[test]
fn a_model_is_of_keyway_workers_where_all_that_have_it_are() {
    let of = |numerics_ids: &[Option<&str>]| {
        let fleet = fleet(&vec![Is::Up("m"); numerics_ids.len()]);
        for (worker, id) in fleet.all().iter().zip(numerics_ids) {
            let json = RawValue::from_string("{}".to_owned()).unwrap();
            let numerics_id = id.map(Into::into);
            worker.set_models(vec![Model {
                id: "m".into(),
                parent: None,
                json,
                context: None,
                numerics_id,
                kv_source_port: None,
            }]);
        }
        fleet.is_of_keyway_workers("m")
    };
    assert!(of(&[Some("cpu"), Some("cuda")]) && !of(&[Some("cpu"), None]) && !of(&[None]) && !of(&[]));
    assert!(!fleet(&[Is::UpUnknown]).is_of_keyway_workers("m"));
}

#[test]
fn a_worker_says_how_its_url_is_asked_without_a_password() {
    let config: WorkerConfig = "http://u:canary@W:1/a/v1/".parse().unwrap();
    let worker = fleet(&[]).add(&config, NOW);
    assert_eq!(
        (worker.name.as_str(), worker.url_of("/v1/models").as_str()),
        ("w:1/a", "http://w:1/a/v1/models")
    );
    assert_eq!(worker.target(&PathAndQuery::from_static("/v1/models")), "/a/v1/models");
    assert_eq!(worker.origin().host_header(), "w:1");
    assert_eq!(worker.name_header().unwrap(), "w:1/a");
    assert!(!format!("{worker:?}").contains("canary"));
}
