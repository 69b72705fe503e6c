//! Learns of workers that come and go, from a file and from DNS, and tells [`Members`]. A look that fails changes nothing:
//! a broken file or a silent name server must not take down a fleet that works; health takes out who is really gone.

use std::{collections::HashMap, fs, path::Path, sync::Arc};

use crate::{
    clock,
    config::{self, DiscoveryConfig, DnsName, File, WorkerConfig},
    limits::MAX_WORKERS_FILE_BYTES,
    members::{Members, Source},
    metrics::Metrics,
    net,
};

/// Looks again and again, for ever.
pub async fn watch(config: DiscoveryConfig, members: Arc<Members>, metrics: Arc<Metrics>) {
    let mut told = HashMap::new();
    loop {
        if let Some(path) = &config.file {
            take(Source::File, &path.display().to_string(), listed(path), &members, &metrics, &mut told);
        }
        for (place, name) in config.dns.iter().enumerate() {
            take(Source::Dns(place), &name.host, resolved(name).await, &members, &metrics, &mut told);
        }
        clock::sleep(config.interval).await;
    }
}

/// Takes what one look found; says what is wrong when that changes.
fn take(
    source: Source,
    place: &str,
    found: Result<Vec<WorkerConfig>, String>,
    members: &Arc<Members>,
    metrics: &Metrics,
    told: &mut HashMap<Source, String>,
) {
    let outcome = if found.is_ok() { "ok" } else { "failed" };
    metrics.fleet.discovery.with_label_values(&[source.as_str(), outcome]).inc();
    match found {
        Ok(workers) => {
            told.remove(&source);
            members.set(source, &workers);
        }
        Err(error) if told.get(&source) != Some(&error) => {
            let source_name = source.as_str();
            tracing::warn!(source = source_name, place, %error, "workers could not be listed; those known stay");
            told.insert(source, error);
        }
        Err(_) => {}
    }
}

/// The workers of a file: the `worker` list of the configuration, alone.
fn listed(path: &Path) -> Result<Vec<WorkerConfig>, String> {
    let size = fs::metadata(path).map_err(|error| error.to_string())?.len();
    if size > MAX_WORKERS_FILE_BYTES {
        return Err(format!("{size} bytes; at most {MAX_WORKERS_FILE_BYTES} are read"));
    }
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    workers_in(&text)
}

fn workers_in(text: &str) -> Result<Vec<WorkerConfig>, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Workers {
        #[serde(default)]
        worker: Vec<config::WorkerEntry>,
    }
    // The configuration's own parser first, because its errors name the line.
    File::parse(text).map_err(|error| error.0)?;
    let only: Workers = toml::from_str(text).map_err(|error| error.message().replace('\n', "; "))?;
    config::workers(&only.worker).map_err(|error| error.0)
}

/// A worker at each address of a name.
async fn resolved(name: &DnsName) -> Result<Vec<WorkerConfig>, String> {
    let addresses = net::resolve(&name.host, name.port).await.map_err(|error| error.to_string())?;
    addresses.into_iter().map(|address| name.worker(address).map_err(|error| error.0)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_workers_holds_workers_and_nothing_else() {
        let found = workers_in("worker = [\"http://a:1\"]").unwrap();
        assert_eq!(found[0].name(), "a:1");
        assert!(workers_in("").unwrap().is_empty());
        for (text, word) in [
            ("worker = [\"a:1\"]", "http://"),
            ("listen = \"127.0.0.1:1\"", "listen"),
            ("[[worker]]\nurl = \"http://a:1\"\nwait = 1", "wait"),
            ("worker = [\"http://a:1\", \"http://a:1\"]", "twice"),
        ] {
            let error = workers_in(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
