//! Before the operators' listener. What HTTP forbids is refused there as it is to clients. With a token in
//! the configuration, only who shows it sees more than liveness and readiness, which a kubelet asks for
//! without one, and the page, which shows nothing until it is given the token.

use std::convert::Infallible;

use http::{HeaderValue, header::AUTHORIZATION};
use tower::{Layer, Service, ServiceExt};

use crate::{
    access::tenants::key_hash,
    edge::{
        around::around,
        live::Live,
        stack::{Arrived, Stack},
        well_formed::well_formed,
    },
    error::Error,
    proxy::body::Response,
};

/// The service for requests that show the token in force (`Bearer …`); for all where there is none.
pub fn guarded(live: Live, service: impl Stack) -> impl Stack {
    around(move |arrived, next| guard(live.now().admin_token.clone(), arrived, next)).layer(service)
}

async fn guard<S>(token: Option<HeaderValue>, arrived: Arrived, next: S) -> Result<Response, Infallible>
where
    S: Service<Arrived, Response = Response, Error = Infallible>,
{
    if let Err(error) = well_formed(&arrived.request) {
        return Ok(error.to_response());
    }
    let open = matches!(arrived.request.uri().path(), "/livez" | "/readyz" | "/");
    let shown = arrived.request.headers().get(AUTHORIZATION);
    // Hashes are compared, so that the time it takes says nothing of how much of a guess was right.
    let may = token.is_none_or(|token| {
        shown.is_some_and(|shown| key_hash(shown.as_bytes()) == key_hash(token.as_bytes()))
    });
    if open || may { next.oneshot(arrived).await } else { Ok(Error::BadKey.to_response()) }
}
