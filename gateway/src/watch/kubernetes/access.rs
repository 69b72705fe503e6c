//! How the cluster is reached: as a pod in it by its service account, or by a kubeconfig; how long to wait
//! after it failed; and what a failure means to an operator.

use std::{error::Error, path::Path, time::Duration};

use kube::{
    Client, Config,
    config::{InClusterError, KubeConfigOptions, Kubeconfig, KubeconfigError},
    core::Status,
    runtime::utils::Backoff,
};

use crate::{
    config::ConfigError,
    limits::{KUBERNETES_PAUSE, KUBERNETES_WATCH_SECONDS},
};

/// Why there is no client of the API server.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    /// The kubeconfig that is named cannot be used.
    #[error("{}", chain(.0))]
    Kubeconfig(#[from] KubeconfigError),
    /// None is named, the gateway is no pod, and no kubeconfig in the usual places can be used.
    #[error("neither as a pod ({}) nor by a kubeconfig ({})", chain(.in_cluster), chain(.kubeconfig))]
    Neither {
        /// Why not as a pod.
        in_cluster: InClusterError,
        /// Why not by a kubeconfig.
        #[source]
        kubeconfig: KubeconfigError,
    },
    /// No client can be made of what is configured.
    #[error("{}", chain(.0))]
    Connect(#[from] kube::Error),
}

/// A client of the API server. The service account's token is read again as it is renewed.
pub(super) async fn client(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    let options = KubeConfigOptions::default();
    let mut config = match kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path)?;
            Config::from_custom_kubeconfig(file, &options).await?
        }
        None => match Config::incluster() {
            Ok(config) => config,
            Err(in_cluster) => {
                let neither = |kubeconfig| ClientError::Neither { in_cluster, kubeconfig };
                Config::from_kubeconfig(&options).await.map_err(neither)?
            }
        },
    };
    // The caller waits and asks again by itself, and counts how often.
    config.default_retry = false;
    // A connection that has died silently ends what it was asked for, a little after the watch would have
    // ended.
    config.read_timeout = Some(Duration::from_secs(u64::from(KUBERNETES_WATCH_SECONDS) + 10));
    config.reset_reader_on_write = true;
    Ok(Client::try_from(config)?)
}

/// Whether a kubeconfig can be used.
pub fn check(path: &Path) -> Result<(), ConfigError> {
    let wrong = |error| ConfigError(format!("discovery.kubeconfig {}: {}", path.display(), chain(&error)));
    Kubeconfig::read_from(path).map(drop).map_err(wrong)
}

/// An error of the API server, and what to do about it where that is known.
pub(super) fn explain(error: &(dyn Error + 'static)) -> String {
    let refused = refusal(error);
    let text = refused.map_or_else(
        || chain(error),
        |status| format!("the API server answers {}: {}", status.code, status.message),
    );
    let hint = match refused.map(|status| status.code) {
        Some(401) => "; is the service account's token mounted, and not expired?",
        Some(403) => "; the gateway's service account needs a Role (deploy/docs/kubernetes.md, rights)",
        Some(400) => "; is discovery.kubernetes.selector as Kubernetes writes selectors?",
        _ => "",
    };
    format!("{text}{hint}")
}

/// The HTTP status by which the API server refused, if it did.
pub(super) fn status(error: &(dyn Error + 'static)) -> Option<u16> {
    refusal(error).map(|status| status.code)
}

fn refusal<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Status> {
    let mut error = Some(error);
    while let Some(cause) = error {
        if let Some(kube::Error::Api(status)) = cause.downcast_ref::<kube::Error>() {
            return Some(status);
        }
        error = cause.source();
    }
    None
}

/// An error with its causes, in one line, without those that it quotes itself.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let next = cause.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = cause.source();
    }
    text
}

/// Pauses that double, each of them up to a half longer, so that many gateways do not come back at once.
#[derive(Debug)]
pub(super) struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(KUBERNETES_PAUSE.0)
    }
}

impl Pauses {
    /// The pause to take now. The one after it is twice as long, up to the longest.
    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(KUBERNETES_PAUSE.1);
        pause.mul_f64(1.0 + fastrand::f64() / 2.0)
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(self.next_pause())
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_bound_and_begin_anew_after_a_success() {
        let mut pauses = Pauses::default();
        let first: Vec<Duration> = (0..10).map(|_| pauses.next_pause()).collect();
        assert!(first[1] >= KUBERNETES_PAUSE.0 * 2 && first[0] < KUBERNETES_PAUSE.0 * 2);
        assert!(first[9] >= KUBERNETES_PAUSE.1 && first[9] <= KUBERNETES_PAUSE.1.mul_f64(1.5));
        pauses.reset();
        assert!(pauses.next_pause() < KUBERNETES_PAUSE.0 * 2);
    }

    #[test]
    fn a_kubeconfig_that_is_none_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "clusters: 7").unwrap();
        let error = check(file.path()).unwrap_err().0;
        assert!(error.starts_with("discovery.kubeconfig /") && error.len() > 60, "{error}");
    }
}
