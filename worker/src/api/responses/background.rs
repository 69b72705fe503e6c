//! A response that its client does not wait for: it is told that the request is queued, and asks for the
//! answer later, by its id. Who cancels or deletes it ends its generation; so does a store that forgets it.

use std::future::poll_fn;
use std::sync::Arc;

use super::answer::Making;
use crate::answer::reader::Shown;
use crate::api::error::ApiError;
use crate::api::request::Call;
use crate::api::running::{Running, outcome};
use crate::api::{App, Response, json_response};
use crate::metrics::{Outcome, RequestGuard};
use crate::request_memory::Room;

/// Begins a response whose generation was submitted, and tells its client how to ask for it.
pub(in crate::api) fn begin(
    app: &Arc<App>,
    call: &mut Call,
    running: Vec<Running>,
    guard: RequestGuard,
    room: Room,
) -> Result<Response, ApiError> {
    let making = Making::new(app, call);
    let id = making.writer.id().to_owned();
    let queued = making.keep_unfinished();
    let task = tokio::spawn(make(making, running, guard, room)).abort_handle();
    if !app.responses.made_by(&id, task.clone()) {
        task.abort();
        return Err(ApiError::not_kept());
    }
    Ok(json_response(&queued))
}

/// Makes a response to its end. The room of its request is held as long.
async fn make(making: Making, mut running: Vec<Running>, mut guard: RequestGuard, _room: Room) {
    let Some(choice) = running.first_mut() else { return };
    let mut text: Option<Shown> = None;
    loop {
        match poll_fn(|context| choice.poll_text(context)).await {
            Ok(Some(more)) => {
                if text.is_none() {
                    making.has_begun();
                }
                text.get_or_insert_default().append(more);
            }
            Ok(None) => break,
            Err(error) => {
                guard.set(Outcome::Error);
                return making.fail(&error.detail().message);
            }
        }
    }
    guard.set(outcome(choice.output.finish.into_iter()));
    making.whole(choice, text.unwrap_or_default());
}
