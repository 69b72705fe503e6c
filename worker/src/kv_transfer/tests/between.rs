//! Transfers that succeed.

use super::*;

#[tokio::test]
async fn in_every_family_the_answer_is_that_of_one_worker() {
    for source in FAMILIES.map(family).into_iter().chain([ModelSource::Random]) {
        let kind = |shared_memory| Kind { source: source.clone(), shared_memory, ..Kind::default() };
        let first = Node::start(kind(true)).await;
        let (near, far) = (Node::start(kind(true)).await, Node::start(kind(false)).await);
        for (len, is_shared) in [3, 16, 17, 64, 150].into_iter().flat_map(|len| [(len, true), (len, false)]) {
            let second = if is_shared { &near } else { &far };
            let request = request(len, &len.to_string());
            let offered = first.offered(&request).await;
            let blocks = (len as usize - 1) / 16;
            assert_eq!(offered.tokens, blocks * 16);
            let before = second.metrics.external_tokens.get();
            let (tokens, cached) = second.answer(&request, &offered).await;
            assert_eq!(
                second.metrics.external_tokens.get() - before,
                offered.tokens as u64,
                "{source} {len}"
            );
            assert_eq!((tokens, cached), (first.alone(&request).await, 0), "{source} {len}");
        }
        for node in [&first, &near, &far] {
            node.is_empty().await;
        }
        assert_eq!(first.exports("done"), near.imports("done") + far.imports("done"));
        // Each went as it was to, and equally much.
        let (given, taken) = (&first.transfers.metrics.export_bytes, |node: &Node, is_shared| {
            node.transfers.metrics.import_bytes.over(is_shared).get()
        });
        let bytes = given.over(true).get();
        assert!(bytes > 0);
        assert_eq!([given.over(false).get(), taken(&near, true), taken(&far, false)], [bytes; 3]);
        assert_eq!([taken(&near, false), taken(&far, true)], [0; 2]);
    }
}

#[tokio::test]
async fn what_is_here_already_does_not_come_again() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let long = request(150, "");
    let begin = GenerationRequest { prompt: long.prompt[..70].to_vec(), ..long.clone() };
    second.alone(&begin).await;
    let offered = first.offered(&long).await;
    let (tokens, cached) = second.answer(&long, &offered).await;
    assert_eq!((tokens, cached), (first.alone(&long).await, 64), "its own blocks count as cached");
    assert_eq!(second.transfers.metrics.import_blocks.get(), 9 - 4);
    // All of it is here: the other end is told, and lets go.
    let offered = first.offered(&long).await;
    assert_eq!(second.answer(&long, &offered).await.1, 144);
    assert_eq!(second.transfers.metrics.import_blocks.get(), 5);
    first.is_empty().await;
    second.is_empty().await;
}

#[tokio::test]
async fn with_one_key_two_workers_know_each_other() {
    let key = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(key.path(), "a secret of the fleet\n").unwrap();
    let kind = || Kind { key: Some(key.path().to_owned()), ..Kind::default() };
    let (first, second) = (Node::start(kind()).await, Node::start(kind()).await);
    let request = request(70, "");
    let offered = first.offered(&request).await;
    assert_eq!(second.answer(&request, &offered).await.0, first.alone(&request).await);
    assert_eq!(second.imports("done"), 1);
}

#[tokio::test]
async fn many_at_once_get_each_their_own() {
    let (first, second) = (Node::start(Kind::default()).await, Node::start(Kind::default()).await);
    let requests: Vec<_> = (0..12).map(|i| request(40 + i, &i.to_string())).collect();
    let mut offers = Vec::new();
    for request in &requests {
        offers.push(first.offered(request).await);
    }
    assert_eq!(first.transfers.kept.len(), 12);
    let second = Arc::new(second);
    let mut answers = JoinSet::new();
    for (i, (request, offer)) in requests.iter().cloned().zip(offers).enumerate() {
        let second = Arc::clone(&second);
        answers.spawn(async move { (i, second.answer(&request, &offer).await.0) });
    }
    while let Some(answer) = answers.join_next().await {
        let (i, tokens) = answer.unwrap();
        assert_eq!(tokens, first.alone(&requests[i]).await, "{i}");
    }
    assert_eq!(second.imports("done"), 12);
    first.is_empty().await;
    second.is_empty().await;
}
