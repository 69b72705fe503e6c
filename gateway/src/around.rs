//! A tower layer from an async function `(request, next) -> response`: what most layers of the stack are.

use std::{
    future::Future,
    task::{Context, Poll},
};

use tower::{Layer, Service};

/// Makes a layer of `f`, which gets each request and the service below it, ready to be called.
pub fn around<F>(f: F) -> AroundLayer<F> {
    AroundLayer(f)
}

/// Layer made by [`around`].
#[derive(Debug, Clone)]
pub struct AroundLayer<F>(F);

impl<S, F: Clone> Layer<S> for AroundLayer<F> {
    type Service = Around<S, F>;

    fn layer(&self, inner: S) -> Self::Service {
        Around { inner, f: self.0.clone() }
    }
}

/// Service made by [`around`].
#[derive(Debug, Clone)]
pub struct Around<S, F> {
    inner: S,
    f: F,
}

impl<S, F, R, Fut, T> Service<R> for Around<S, F>
where
    S: Service<R> + Clone,
    F: Fn(R, S) -> Fut,
    Fut: Future<Output = Result<T, S::Error>>,
{
    type Response = T;
    type Error = S::Error;
    type Future = Fut;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> Fut {
        // The clone that was polled ready goes to the call; the fresh one stays (tower's contract).
        let fresh = self.inner.clone();
        (self.f)(request, std::mem::replace(&mut self.inner, fresh))
    }
}
