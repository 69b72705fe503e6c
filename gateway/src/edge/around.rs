//! A tower layer from an async function `(request, next) -> response`: what most layers of the stack are. For
//! services that are ready at all times, as all of the stack's are: what bounds requests there answers those
//! it refuses.

use std::{
    convert::Infallible,
    future::Future,
    sync::Arc,
    task::{Context, Poll},
};

use tower::{Layer, Service};

/// Makes a layer of `f`, which gets each request and the service below it.
pub fn around<F>(f: F) -> AroundLayer<F> {
    AroundLayer(f)
}

/// Layer made by [`around`].
#[derive(Debug, Clone)]
pub struct AroundLayer<F>(F);

impl<S, F: Clone> Layer<S> for AroundLayer<F> {
    type Service = Around<S, F>;

    fn layer(&self, inner: S) -> Self::Service {
        Around(Arc::new((self.0.clone(), inner)))
    }
}

/// Service made by [`around`]. Shared, so that a request on its way down clones the layer below and not all
/// that are below that.
#[derive(Debug)]
pub struct Around<S, F>(Arc<(F, S)>);

impl<S, F> Clone for Around<S, F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S, F, R, Fut, T> Service<R> for Around<S, F>
where
    S: Service<R, Error = Infallible> + Clone,
    F: Fn(R, S) -> Fut,
    Fut: Future<Output = Result<T, Infallible>>,
{
    type Response = T;
    type Error = Infallible;
    type Future = Fut;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: R) -> Fut {
        let (f, below) = &*self.0;
        f(request, below.clone())
    }
}
