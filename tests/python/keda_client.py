"""KEDA's side of the external scaler, with the real gRPC library: keda_client.py ADDRESS MODEL OTHER SPLIT. MODEL's fleet is empty
and wants nothing until somebody else sends a request; OTHER always wants three workers, SPLIT two for prefill and four for
decode. Says `follows` once it has a stream open, then `pushed ACTIVE VALUE` for each change that is pushed, with the metric's
value right after it."""

import os
import sys

import grpc

# It finds descriptions as Python finds modules.
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../data"))
protos, services = grpc.protos_and_services("externalscaler.proto")
address, model, other, split = sys.argv[1:5]


def trigger(name, role=None):
    # As KEDA sends it: all of the trigger's metadata.
    metadata = {"scalerAddress": address, **({"model": name} if name else {}), **({"role": role} if role else {})}
    return protos.ScaledObjectRef(name="workers", namespace="default", scalerMetadata=metadata)


def value(name, role=None):
    (spec,) = scaler.GetMetricSpec(trigger(name, role)).metricSpecs
    assert spec.metricName == "keyway-desired-workers" + (f"-{role}" if role else ""), spec
    request = protos.GetMetricsRequest(scaledObjectRef=trigger(name, role), metricName=spec.metricName)
    (metric,) = scaler.GetMetrics(request).metricValues
    assert metric.metricName == spec.metricName, metric
    assert metric.metricValue == metric.metricValueFloat, metric
    return metric.metricValue


def refused(call, request):
    try:
        list(answer) if hasattr(answer := call(request), "__iter__") else answer
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("it was not refused")


with grpc.insecure_channel(address) as channel:
    scaler = services.ExternalScalerStub(channel)
    assert scaler.IsActive(trigger(other)).result and value(other) == 3
    assert not scaler.IsActive(trigger(model)).result and value(model) == 0
    (spec,) = scaler.GetMetricSpec(trigger(model)).metricSpecs
    assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == ("keyway-desired-workers", 1, 1.0), spec
    code, details = refused(scaler.IsActive, trigger("unknown"))
    assert code == grpc.StatusCode.NOT_FOUND and '"unknown"' in details, (code, details)
    code, details = refused(scaler.StreamIsActive, trigger(None))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "3 models" in details, (code, details)
    # Where workers have roles, each has a number of its own.
    assert (value(split, "prefill"), value(split, "decode")) == (2, 4)
    code, details = refused(scaler.GetMetricSpec, trigger(split))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "metadata.role" in details, (code, details)
    code, details = refused(scaler.IsActive, trigger(split, "both"))
    assert code == grpc.StatusCode.NOT_FOUND and '"both"' in details, (code, details)
    # It is optional, and KEDA takes this answer for "not offered".
    assert refused(scaler.StreamMetricSpec, trigger(model))[0] == grpc.StatusCode.UNIMPLEMENTED
    stream = scaler.StreamIsActive(trigger(model))
    assert not next(stream).result
    print("follows", flush=True)
    for change in stream:
        print(f"pushed {change.result} {value(model)}", flush=True)
