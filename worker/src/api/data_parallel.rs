//! The header by which a request says which data-parallel engine is to take it, as vLLM has it.

use http::HeaderMap;
use keyway_wire::headers::DATA_PARALLEL_RANK;

use super::error::ApiError;

/// The rank that is asked for, below `engines`; `None`: any.
pub(super) fn rank(headers: &HeaderMap, engines: usize) -> Result<Option<usize>, ApiError> {
    let Some(value) = headers.get(DATA_PARALLEL_RANK) else { return Ok(None) };
    let rank = value.to_str().ok().and_then(|value| value.trim().parse().ok());
    if let Some(rank) = rank.filter(|rank| *rank < engines) {
        return Ok(Some(rank));
    }
    let message = format!(
        "The header '{DATA_PARALLEL_RANK}' must be a number below {engines}: this worker has that many data-parallel \
         engines."
    );
    Err(ApiError::invalid_value(DATA_PARALLEL_RANK, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_a_number_of_an_engine_that_is_there() {
        let with = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(DATA_PARALLEL_RANK, value.parse().unwrap());
            rank(&headers, 4).ok()
        };
        assert_eq!(rank(&HeaderMap::new(), 1).ok(), Some(None));
        assert_eq!(with("3"), Some(Some(3)));
        for wrong in ["4", "-1", "x", ""] {
            assert_eq!(with(wrong), None, "{wrong:?}");
        }
    }
}
