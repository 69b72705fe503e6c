//! Learns of workers that come and go, from a file and from DNS, and tells [`Members`]; Kubernetes' part of
//! it is in `kubernetes.rs`. A look that fails changes nothing: a broken file or a silent name server must
//! not take down a fleet that works; health takes out who is really gone.

use std::{fmt, fs, io, path::Path, sync::Arc};

use crate::{
    clock,
    config::{self, ConfigError, DiscoveryConfig, DnsName, File, WorkerConfig},
    limits::MAX_WORKERS_FILE_BYTES,
    metrics::Metrics,
    net,
    watch::{
        kubernetes,
        members::{Listed, Members, Source},
    },
};

/// Looks again and again, for ever.
pub async fn watch(config: DiscoveryConfig, members: Arc<Members>, metrics: Arc<Metrics>) {
    let listing = lists(&config, &members, &metrics);
    tokio::join!(listing, kubernetes::follow(config.clone(), Arc::clone(&members), Arc::clone(&metrics)));
}

/// The file and the names.
async fn lists(config: &DiscoveryConfig, members: &Arc<Members>, metrics: &Arc<Metrics>) {
    let looks = |source, place: &str| Looks::new(source, place, members, metrics);
    let file = config.file.as_ref().map(|path| (path, looks(Source::File, &path.display().to_string())));
    let mut file = file.into_iter().collect::<Vec<_>>();
    let names = config.dns.iter().enumerate();
    let mut names: Vec<_> =
        names.map(|(place, name)| (name, looks(Source::Dns(place), &name.host))).collect();
    while !file.is_empty() || !names.is_empty() {
        for (path, looks) in &mut file {
            looks.take(listed(path));
        }
        for (name, looks) in &mut names {
            looks.take(resolved(name).await);
        }
        clock::sleep(config.interval).await;
    }
}

/// What is seen at one place where workers are listed.
#[derive(Debug)]
pub struct Looks {
    source: Source,
    place: String,
    members: Arc<Members>,
    metrics: Arc<Metrics>,
    /// What was last said to be wrong.
    told: Option<String>,
}

/// Why workers could not be listed.
#[derive(Debug, thiserror::Error)]
enum ListError {
    /// The file cannot be read.
    #[error(transparent)]
    Read(io::Error),
    #[error("{0} bytes; at most {MAX_WORKERS_FILE_BYTES} are read")]
    TooLarge(u64),
    /// There is more in the file than workers.
    #[error("{}", .0.message().replace('\n', "; "))]
    NotWorkersAlone(#[from] toml::de::Error),
    #[error(transparent)]
    Workers(#[from] ConfigError),
    /// The name has no addresses.
    #[error(transparent)]
    Resolve(io::Error),
}

impl Looks {
    /// At a place that was not looked at yet.
    pub fn new(source: Source, place: &str, members: &Arc<Members>, metrics: &Arc<Metrics>) -> Self {
        let (members, metrics) = (Arc::clone(members), Arc::clone(metrics));
        Self { source, place: place.to_owned(), members, metrics, told: None }
    }

    fn take(&mut self, found: Result<Vec<WorkerConfig>, ListError>) {
        match found {
            Ok(workers) => self.found(&workers.into_iter().map(Listed::from).collect::<Vec<_>>()),
            Err(error) => self.failed(&error),
        }
    }

    /// Takes what one look found.
    pub fn found(&mut self, workers: &[Listed]) {
        self.count("ok");
        self.told = None;
        self.members.set(self.source, workers);
    }

    /// A look failed: nothing changes. Says what is wrong when that changes.
    pub fn failed(&mut self, error: &dyn fmt::Display) {
        self.count("failed");
        let error = error.to_string();
        if self.told.as_ref() != Some(&error) {
            let (source, place) = (self.source.as_str(), &self.place);
            tracing::warn!(source, place, %error, "workers could not be listed; those known stay");
            self.told = Some(error);
        }
    }

    fn count(&self, outcome: &str) {
        self.metrics.fleet.discovery.with_label_values(&[self.source.as_str(), outcome]).inc();
    }
}

/// The workers of a file: the `worker` list of the configuration, alone.
fn listed(path: &Path) -> Result<Vec<WorkerConfig>, ListError> {
    let size = fs::metadata(path).map_err(ListError::Read)?.len();
    if size > MAX_WORKERS_FILE_BYTES {
        return Err(ListError::TooLarge(size));
    }
    let text = fs::read_to_string(path).map_err(ListError::Read)?;
    workers_in(&text)
}

fn workers_in(text: &str) -> Result<Vec<WorkerConfig>, ListError> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Workers {
        #[serde(default)]
        worker: Vec<config::WorkerEntry>,
    }
    // The configuration's own parser first, because its errors name the line.
    File::parse(text)?;
    let only: Workers = toml::from_str(text)?;
    Ok(config::workers(&only.worker)?)
}

/// The workers at the addresses of a name.
async fn resolved(name: &DnsName) -> Result<Vec<WorkerConfig>, ListError> {
    let addresses = net::resolve(&name.host, name.port).await.map_err(ListError::Resolve)?;
    let mut workers = Vec::with_capacity(addresses.len());
    for address in addresses {
        workers.extend(name.workers(address)?);
    }
    Ok(workers)
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
            let error = workers_in(text).unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
