//! What a gateway that starts gets from another one before clients come: the index, in the form of a
//! snapshot. Whoever has it first gives it, within a bound of time and bytes; without one this gateway
//! begins with what it knows itself, and says so.

use std::net::SocketAddr;

use bytes::BytesMut;
use http::{Uri, header::AUTHORIZATION, uri::PathAndQuery};
use http_body_util::BodyExt;

use super::{LookupError, Peers, addresses};
use crate::{
    clock,
    config::PeersConfig,
    limits::{PEER_INDEX_TIMEOUT, PROBE_TIMEOUT, STORED_IDS_BYTES},
    routing::snapshot::{Memory, SnapshotError},
    upstream::{Origin, Outgoing},
};

/// Why another gateway's index is not taken.
#[derive(Debug, thiserror::Error)]
enum NoIndex {
    #[error(transparent)]
    Lookup(#[from] LookupError),
    #[error("no connection")]
    Connect,
    /// 503: it starts too, or gives it to somebody else.
    #[error("it answered {0}")]
    Status(http::StatusCode),
    #[error("it broke off")]
    Broken,
    #[error("more than {0} bytes")]
    TooLarge(usize),
    #[error(transparent)]
    Unusable(#[from] SnapshotError),
}

impl Peers {
    /// Takes another gateway's index, if one has it.
    pub async fn catch_up(&self, config: &PeersConfig, memory: &Memory) {
        let began = clock::Instant::now();
        let took = |blocks: usize, peer: SocketAddr| {
            let milliseconds = began.elapsed().as_millis() as u64;
            tracing::info!(%peer, blocks, milliseconds, "the index was taken from another gateway");
        };
        match clock::timeout(PEER_INDEX_TIMEOUT, self.index_of_another(config, memory)).await {
            Ok(Ok((blocks, peer))) => took(blocks, peer),
            Ok(Err(reasons)) => {
                let reasons = reasons.join("; ");
                tracing::warn!(
                    reasons,
                    "no other gateway gives its index: this one starts with what it knows itself"
                );
            }
            Err(_) => {
                let seconds = PEER_INDEX_TIMEOUT.as_secs();
                tracing::warn!(
                    "no other gateway gives its index within {seconds} s: this one starts with what it knows itself"
                );
            }
        }
    }

    /// The first that one of them gives; else what each said.
    async fn index_of_another(
        &self,
        config: &PeersConfig,
        memory: &Memory,
    ) -> Result<(usize, SocketAddr), Vec<String>> {
        let mut peers = addresses(config).await.map_err(|error| vec![error.to_string()])?;
        fastrand::shuffle(&mut peers);
        let mut reasons = Vec::new();
        for peer in peers {
            match self.index_of(peer, config, memory).await {
                Ok(blocks) => return Ok((blocks, peer)),
                Err(error) => reasons.push(format!("{peer}: {error}")),
            }
        }
        Err(reasons)
    }

    async fn index_of(
        &self,
        peer: SocketAddr,
        config: &PeersConfig,
        memory: &Memory,
    ) -> Result<usize, NoIndex> {
        let url = Uri::builder().scheme("http").authority(peer.to_string()).path_and_query("/").build();
        let origin = Origin::of(&url.map_err(|_| NoIndex::Connect)?, None, false);
        let mut request = Outgoing::get(PathAndQuery::from_static("/index"));
        if let Some(token) = config.token.clone().or_else(|| self.admin_token.borrow().clone()) {
            request.set(AUTHORIZATION, token);
        }
        let answer = clock::timeout(PROBE_TIMEOUT, self.upstream.send(&origin, request)).await;
        let answer = answer.ok().and_then(Result::ok).ok_or(NoIndex::Connect)?;
        if !answer.status().is_success() {
            return Err(NoIndex::Status(answer.status()));
        }
        let most = memory.router.index().with(|index| index.bytes()) + STORED_IDS_BYTES;
        let (mut body, mut bytes) = (answer.into_body(), BytesMut::new());
        while let Some(frame) = body.frame().await {
            if let Ok(data) = frame.map_err(|_| NoIndex::Broken)?.into_data() {
                if bytes.len() + data.len() > most {
                    return Err(NoIndex::TooLarge(most));
                }
                bytes.extend_from_slice(&data);
            }
        }
        Ok(memory.take(&bytes)?)
    }
}
