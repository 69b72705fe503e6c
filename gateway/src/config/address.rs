//! Addresses to listen on, as people write them: an IP address and a port, or `localhost` and one.

use std::net::{Ipv4Addr, SocketAddr};

use serde::{Deserialize, Deserializer, de::Error};

/// `IP:PORT`, or `localhost:PORT` for 127.0.0.1. The error says what to write instead.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let text = text.trim();
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    let port = |port: &str| port.parse::<u16>().ok();
    if let Some(port) = text.strip_prefix("localhost:").and_then(port) {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    Err(match port(text.trim_start_matches(':')) {
        Some(port) => {
            format!("write 127.0.0.1:{port} for this host alone, or 0.0.0.0:{port} for all of them")
        }
        None => "write IP:PORT, such as 127.0.0.1:8080 or [::]:8080".to_owned(),
    })
}

/// The same, where a file has one.
pub(super) fn read<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<SocketAddr>, D::Error> {
    listen_address(&String::deserialize(deserializer)?).map(Some).map_err(D::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_understood_or_corrected() {
        for (text, address) in [
            ("127.0.0.1:8080", "127.0.0.1:8080"),
            (" 0.0.0.0:1 ", "0.0.0.0:1"),
            ("[::1]:80", "[::1]:80"),
            ("localhost:8080", "127.0.0.1:8080"),
        ] {
            assert_eq!(listen_address(text), Ok(address.parse().unwrap()), "{text}");
        }
        for (text, hint) in [
            ("8080", "127.0.0.1:8080"),
            (":8080", "0.0.0.0:8080"),
            ("localhost", "IP:PORT"),
            ("localhost:99999", "IP:PORT"),
            ("example.com:80", "IP:PORT"),
            ("", "IP:PORT"),
        ] {
            let error = listen_address(text).unwrap_err();
            assert!(error.contains(hint), "{text}: {error}");
        }
    }
}
