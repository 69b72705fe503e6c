"""Writes tests/data/oidc_tokens.json: an issuer's keys and tokens, by PyJWT and cryptography, which share nothing with the gateway.

pip install pyjwt cryptography && python3 tests/python/oidc_tokens.py > tests/data/oidc_tokens.json"""

import base64
import hashlib
import hmac
import json

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

FAR = 4_102_444_800  # the year 2100
PAST = 946_684_800  # the year 2000
CLAIMS = {"iss": "https://login.example.com", "aud": "keyway", "sub": "alice", "exp": FAR, "team": "analysts"}

keys = {
    "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "p256": ec.generate_private_key(ec.SECP256R1()),
    "p384": ec.generate_private_key(ec.SECP384R1()),
    "ed": ed25519.Ed25519PrivateKey.generate(),
    "stranger": ec.generate_private_key(ec.SECP256R1()),
}
BY = {"rsa": "RS256", "p256": "ES256", "p384": "ES384", "ed": "EdDSA"}


def jwk(name):
    algorithm = jwt.get_algorithm_by_name(BY[name])
    return json.loads(algorithm.to_jwk(keys[name].public_key())) | {"kid": name, "use": "sig"}


def token(name, algorithm, claims=(), headers=()):
    return jwt.encode(CLAIMS | dict(claims), keys[name], algorithm=algorithm, headers={"kid": name} | dict(headers))


def part(value):
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def forged_by_hmac():
    """As a verifier takes for good that lets a token say how it is verified: the public key as a shared secret."""
    secret = keys["rsa"].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = part({"alg": "HS256", "kid": "rsa", "typ": "JWT"}) + "." + part(CLAIMS)
    mac = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
    return signed + "." + base64.urlsafe_b64encode(mac).rstrip(b"=").decode()


def other_claims(text):
    head, claims, signature = text.split(".")
    read = json.loads(base64.urlsafe_b64decode(claims + "=="))
    return ".".join([head, part(read | {"team": "builders"}), signature])


RSA = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]
good = {algorithm: token("rsa", algorithm) for algorithm in RSA}
good |= {BY[name]: token(name, BY[name]) for name in ["p256", "p384", "ed"]}
good["no kid"] = jwt.encode(CLAIMS, keys["p256"], algorithm="ES256")
good["several audiences"] = token("p256", "ES256", {"aud": ["other", "keyway"]})
good["several teams"] = token("p256", "ES256", {"team": ["nobody", "analysts"]})
unsigned = jwt.encode(CLAIMS, None, algorithm="none", headers={"kid": "rsa"})
bad = {
    "expired": token("p256", "ES256", {"exp": PAST}),
    "early": token("p256", "ES256", {"nbf": FAR}),
    "issuer": token("p256", "ES256", {"iss": "https://login.example.org"}),
    "audience": token("p256", "ES256", {"aud": "other"}),
    "signature": other_claims(good["ES256"]),
    "signature of a stranger": token("stranger", "ES256", headers={"kid": "p256"}),
    "unknown_key": token("stranger", "ES256"),
    "malformed, unsigned": unsigned,
    "algorithm shared secret": forged_by_hmac(),
    "unknown_key of another kind": token("p256", "ES256", headers={"kid": "rsa"}),
    "claims without exp": jwt.encode({k: v for k, v in CLAIMS.items() if k != "exp"}, keys["p256"], algorithm="ES256"),
    "claims without aud": jwt.encode({k: v for k, v in CLAIMS.items() if k != "aud"}, keys["p256"], algorithm="ES256"),
    "no_tenant": token("p256", "ES256", {"team": "nobody"}),
}
print(json.dumps({"jwks": {"keys": [jwk(name) for name in BY]}, "good": good, "bad": bad}, indent=1))
