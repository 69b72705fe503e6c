"""A collector of traces: otlp_collector.py REFUSALS. Answers the first REFUSALS posts with 503, reads the others with OpenTelemetry's
own messages, and prints each span as a line `span {...}` in the order in which they came."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

refusals = int(sys.argv[1])


def values(attributes):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        global refusals
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/base/v1/traces", self.path
        assert self.headers["content-type"] == "application/x-protobuf"
        refusals -= 1
        if refusals >= 0:
            self.send_response(503)
            self.send_header("content-length", "0")
            self.end_headers()
            print("refused", flush=True)
            return
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                line = {
                    "service": service, "trace": span.trace_id.hex(), "span": span.span_id.hex(), "parent": span.parent_span_id.hex(),
                    "state": span.trace_state, "name": span.name, "kind": span.kind, "flags": span.flags,
                    "error": span.status.code == 2, "nanos": span.end_time_unix_nano - span.start_time_unix_nano,
                    "started": span.start_time_unix_nano, "attributes": values(span.attributes),
                    "events": [{"name": e.name, **values(e.attributes)} for e in span.events],
                }
                print("span " + json.dumps(line), flush=True)
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Collector)
print(f"collecting on {server.server_address[0]}:{server.server_address[1]}", flush=True)
server.serve_forever()
