//! A connection against a worker at the other end of a pipe, in virtual time.

use std::time::Duration;

use bytes::Bytes;
use h2::{
    RecvStream, SendStream,
    server::{self, SendResponse},
};
use http::{Request, Response};
use http_body::Body;
use http_body_util::BodyExt;
use tokio::{
    io::DuplexStream,
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

use super::*;
use crate::upstream::{Answer, Failure, share};

type Call = (Request<RecvStream>, SendResponse<Bytes>);

/// The worker's end, which moves bytes in a task of its own until told to do something else.
struct Far {
    calls: mpsc::UnboundedReceiver<Call>,
    orders: mpsc::UnboundedSender<Order>,
}

enum Order {
    /// GOAWAY, and the end when all has been said.
    Leave,
    /// GOAWAY that names the last stream so far, and the end.
    Quit,
    /// Neither reads nor writes any more.
    Freeze,
}

async fn pair(most: u32) -> (Arc<Shared>, Far) {
    let (near, far) = tokio::io::duplex(1 << 20);
    let (calls, received) = mpsc::unbounded_channel();
    let (orders, told) = mpsc::unbounded_channel();
    tokio::spawn(serve(far, most, calls, told));
    let shared = Shared::open(near).await.unwrap();
    (shared, Far { calls: received, orders })
}

async fn serve(
    io: DuplexStream,
    most: u32,
    calls: mpsc::UnboundedSender<Call>,
    mut orders: mpsc::UnboundedReceiver<Order>,
) {
    let mut builder = server::Builder::new();
    let mut connection = builder.max_concurrent_streams(most).handshake::<_, Bytes>(io).await.unwrap();
    loop {
        tokio::select! {
            call = connection.accept() => match call {
                Some(Ok(call)) => calls.send(call).unwrap_or_default(),
                _ => return,
            },
            order = orders.recv() => match order {
                Some(Order::Leave) => connection.graceful_shutdown(),
                Some(Order::Quit) => connection.abrupt_shutdown(Reason::NO_ERROR),
                Some(Order::Freeze) => std::future::pending().await,
                None => {}
            },
        }
    }
}

fn ask(shared: &Arc<Shared>) -> impl Future<Output = Result<Response<Answer>, Failure>> + use<> {
    let Entry::Free(place) = shared.enter() else { panic!("no place") };
    let request = Request::post("http://worker/v1/completions").body(()).unwrap();
    share(place, request, Bytes::from_static(b"{}"))
}

impl Far {
    /// Begins to answer the next request.
    async fn begin(&mut self) -> SendStream<Bytes> {
        let (_, mut respond) = self.calls.recv().await.unwrap();
        respond.send_response(Response::new(()), false).unwrap()
    }

    fn order(&self, order: Order) {
        self.orders.send(order).unwrap_or_default();
    }
}

async fn text(answer: Answer) -> Result<Bytes, String> {
    answer.collect().await.map(http_body_util::Collected::to_bytes).map_err(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_nobody_reads_waits_at_the_worker_and_holds_up_no_other() {
    let (shared, mut far) = pair(100).await;
    let (asked, mut stalled) = tokio::join!(ask(&shared), far.begin());
    let unread = asked.ok().unwrap().into_body();
    stalled.send_data(Bytes::from(vec![b'x'; 1 << 20]), false).unwrap();
    let (asked, mut other) = tokio::join!(ask(&shared), far.begin());
    other.send_data(Bytes::from(vec![b'y'; 1 << 20]), true).unwrap();
    let whole = timeout(Duration::from_secs(5), text(asked.ok().unwrap().into_body())).await.unwrap();
    assert_eq!(whole.unwrap().len(), 1 << 20);
    // One window of it is here; the rest comes as it is read.
    let mut unread = Box::pin(unread);
    let mut had = 0;
    while let Poll::Ready(Some(Ok(frame))) =
        unread.as_mut().poll_frame(&mut Context::from_waker(Waker::noop()))
    {
        had += frame.into_data().unwrap().len();
    }
    assert_eq!(had, WORKER_H2_WINDOW as usize);
    stalled.send_data(Bytes::new(), true).unwrap();
    assert_eq!(unread.collect().await.unwrap().to_bytes().len(), (1 << 20) - had);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_falls_silent_is_given_up_and_one_that_answers_pings_is_not() {
    let (shared, mut far) = pair(100).await;
    let (asked, _alive) = tokio::join!(ask(&shared), far.begin());
    let mut body = Box::pin(text(asked.ok().unwrap().into_body()));
    assert!(
        timeout(Duration::from_secs(3_600), &mut body).await.is_err(),
        "an hour without a token is no silence"
    );
    far.order(Order::Freeze);
    let began = Instant::now();
    assert!(body.await.is_err());
    assert!(began.elapsed() <= 3 * WORKER_H2_SILENCE, "{:?}", began.elapsed());
    assert!(matches!(shared.enter(), Entry::Over));
    // Without a stream nobody is asked, and nobody is given up.
    let (idle, far) = pair(100).await;
    far.order(Order::Freeze);
    sleep(10 * WORKER_H2_SILENCE).await;
    assert!(matches!(idle.enter(), Entry::Free(_)));
}

#[tokio::test(start_paused = true)]
async fn streams_behind_a_goaway_were_not_begun_and_those_before_may_have_been() {
    let (shared, mut far) = pair(100).await;
    let asked = tokio::spawn(ask(&shared));
    let call = far.calls.recv().await.unwrap();
    // Sent while nothing is known of the GOAWAY, which is on its way and names the stream before.
    far.order(Order::Quit);
    assert!(matches!(ask(&shared).await, Err(Failure::NotBegun)));
    assert!(matches!(asked.await.unwrap(), Err(Failure::Lost(_))));
    assert!(matches!(shared.enter(), Entry::Over));
    drop(call);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_leaves_ends_what_it_has_begun() {
    let (shared, mut far) = pair(100).await;
    let (asked, mut begun) = tokio::join!(ask(&shared), far.begin());
    far.order(Order::Leave);
    sleep(Duration::from_millis(1)).await;
    assert!(matches!(shared.enter(), Entry::Over));
    begun.send_data(Bytes::from_static(b"whole"), true).unwrap();
    assert_eq!(text(asked.ok().unwrap().into_body()).await.unwrap(), "whole");
}

#[tokio::test(start_paused = true)]
async fn a_refused_stream_was_not_begun_and_any_other_reset_may_have_been() {
    let (shared, mut far) = pair(100).await;
    for (reason, not_begun) in [(Reason::REFUSED_STREAM, true), (Reason::INTERNAL_ERROR, false)] {
        let reset = async {
            let (_, mut respond) = far.calls.recv().await.unwrap();
            respond.send_reset(reason);
        };
        let (asked, ()) = tokio::join!(ask(&shared), reset);
        assert_eq!(matches!(asked, Err(Failure::NotBegun)), not_begun, "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_reset_has_broken_off_whatever_the_reason() {
    let (shared, mut far) = pair(100).await;
    for reason in [Reason::CANCEL, Reason::NO_ERROR, Reason::INTERNAL_ERROR] {
        let (asked, mut half) = tokio::join!(ask(&shared), far.begin());
        half.send_data(Bytes::from_static(b"half"), false).unwrap();
        half.send_reset(reason);
        assert!(text(asked.ok().unwrap().into_body()).await.is_err(), "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn no_more_streams_are_open_than_the_worker_allows() {
    let (shared, mut far) = pair(2).await;
    let (a, _a) = tokio::join!(ask(&shared), far.begin());
    let (b, mut sent) = tokio::join!(ask(&shared), far.begin());
    assert!(matches!(shared.enter(), Entry::Full));
    assert!(shared.idle().is_none());
    // Who leaves is reset at the worker at once, and its place is another's.
    drop(b);
    let reset = poll_fn(|cx| sent.poll_reset(cx)).await.unwrap();
    assert_eq!(reset, Reason::CANCEL);
    assert!(matches!(shared.enter(), Entry::Free(_)));
    drop(a);
    sleep(Duration::from_secs(9)).await;
    assert_eq!(shared.idle(), Some(Duration::from_secs(9)));
}

#[tokio::test(start_paused = true)]
async fn who_speaks_no_http2_is_found_out_before_a_request_is_sent() {
    let (near, mut far) = tokio::io::duplex(1 << 10);
    let old = async {
        tokio::io::AsyncWriteExt::write_all(&mut far, b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    };
    let (opened, ()) = tokio::join!(Shared::open(near), old);
    assert!(opened.is_err());
}
