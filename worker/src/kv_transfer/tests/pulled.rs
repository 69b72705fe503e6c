//! What one worker has cached of a prompt, and another one fetches: no leg went before, and nothing was kept.

use super::*;

#[tokio::test]
async fn in_every_family_what_another_has_of_a_prompt_is_gone_on_from() {
    for source in FAMILIES.map(family).into_iter().chain([ModelSource::Random]) {
        let kind = || Kind { source: source.clone(), ..Kind::default() };
        let (first, second) = (Node::start(kind()).await, Node::start(kind()).await);
        for (computed, len) in [(3, 3), (64, 64), (65, 65), (100, 150), (150, 100), (150, 150)] {
            let salt = format!("{computed} {len}");
            // One asks for a beginning of what the other computed, or for more than that.
            let answered = first.alone(&request(computed, &salt)).await.len() as u32;
            let request = request(len, &salt);
            let before = second.metrics.external_tokens.get();
            let (tokens, cached) = second.pull(&request, &first.peer()).await;
            let came = (second.metrics.external_tokens.get() - before) as usize;
            // The last token of an answer has run nowhere; of a prompt it must run.
            let both = (computed + answered - 1).min(computed.max(len)).min(len - 1) / 16 * 16;
            let common = if computed < len { (computed / 16 * 16).min(both) } else { both };
            assert_eq!((came, cached), (common as usize, common as usize), "{source} {computed} {len}");
            assert_eq!(tokens, first.alone(&request).await, "{source} {computed} {len}");
        }
        first.is_empty().await;
        second.is_empty().await;
        assert_eq!(first.exports("done"), second.imports("done"));
        assert_eq!((first.exports("absent"), second.imports("absent")), (1, 1), "of three tokens");
    }
}

#[tokio::test]
async fn what_is_here_already_is_not_fetched() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let long = request(150, "");
    second.alone(&GenerationRequest { prompt: long.prompt[..70].to_vec(), ..long.clone() }).await;
    let expected = first.alone(&long).await;
    assert_eq!(second.pull(&long, &first.peer()).await, (expected.clone(), 144));
    assert_eq!(second.transfers.metrics.import_blocks.get(), 9 - 4);
    assert_eq!(second.metrics.external_tokens.get(), 80);
    // The other way round there is nothing to be fetched either.
    assert_eq!(first.pull(&long, &second.peer()).await, (expected, 144));
    assert_eq!(first.transfers.metrics.import_blocks.get(), 0);
    first.is_empty().await;
    second.is_empty().await;
}

#[tokio::test]
async fn what_another_tenant_or_model_has_is_not_found() {
    let first = Node::start(Kind::default()).await;
    let own = request(70, "a");
    first.alone(&own).await;
    let second = Node::start(Kind::default()).await;
    let mut changed = own.clone();
    changed.prompt[5] += 1;
    for other in [request(70, "b"), changed] {
        assert_eq!(second.pull(&other, &first.peer()).await, (first.alone(&other).await, 0));
        // It is there now.
        first.engine.resident_blocks().await.unwrap();
    }
    assert_eq!((second.imports("absent"), second.imports("done")), (2, 0));
    for (kind, why) in [
        (Kind { source: family("llama"), ..Kind::default() }, "numerics"),
        (Kind { block_size: 32, ..Kind::default() }, "layout"),
    ] {
        let third = Node::start(kind).await;
        let expected = third.alone(&request(70, "alone")).await;
        assert_eq!(third.pull(&request(70, "a"), &first.peer()).await, (expected, 0));
        assert_eq!((third.imports(why), first.exports(why)), (1, 1));
        third.is_empty().await;
    }
    // With the other salt, in full.
    assert_eq!(second.pull(&own, &first.peer()).await.1, 64);
    first.is_empty().await;
    second.is_empty().await;
}

#[tokio::test]
async fn a_worker_that_is_not_there_costs_nothing_but_the_prompt() {
    let second = Node::start(Kind::default()).await;
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let expected = second.alone(&request(70, "alone")).await;
    assert_eq!(second.pull(&request(70, ""), &peer("localhost", nobody)).await, (expected, 0));
    assert_eq!(second.imports("unreachable"), 1);
    second.is_empty().await;
}

/// Both ask each other at once, and many do: each gets its own, and nothing stays held.
#[tokio::test]
async fn two_workers_fetch_from_each_other_at_once() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let (first, second) = (Arc::new(first), Arc::new(second));
    let requests: Vec<_> = (0..6).map(|i| request(60 + i, &i.to_string())).collect();
    let mut expected = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        expected.push(if i % 2 == 0 { &first } else { &second }.alone(request).await);
    }
    let mut answers = JoinSet::new();
    for (i, request) in requests.into_iter().enumerate() {
        let (asks, has) = if i % 2 == 0 { (&second, &first) } else { (&first, &second) };
        let (asks, peer) = (Arc::clone(asks), has.peer());
        answers.spawn(async move { (i, asks.pull(&request, &peer).await) });
    }
    while let Some(answer) = answers.join_next().await {
        let (i, (tokens, cached)) = answer.unwrap();
        assert_eq!((&tokens, cached), (&expected[i], (59 + i) / 16 * 16), "{i}");
    }
    assert_eq!((first.imports("done"), second.imports("done")), (3, 3));
    first.is_empty().await;
    second.is_empty().await;
}
