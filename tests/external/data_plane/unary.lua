-- wrk: chat requests of a size in turn from 256 prompts that share half of it, as agents' turns do.
local size = tonumber(os.getenv("PROMPT_BYTES"))
local shared = string.rep("the quick brown fox jumps over the lazy dog, ", math.ceil(size / 45)):sub(1, size / 2)
local requests, next_one = {}, 0
init = function()
   for i = 1, 256 do
      local own = string.rep(string.format("prompt %d says this, ", i), math.ceil(size / 16)):sub(1, size / 2)
      local body = string.format('{"model":"mock","messages":[{"role":"system","content":"%s"},'
         .. '{"role":"user","content":"%s"}],"max_tokens":1}', shared, own)
      requests[i] = wrk.format("POST", "/v1/chat/completions", { ["content-type"] = "application/json" }, body)
   end
end
request = function()
   next_one = next_one % #requests + 1
   return requests[next_one]
end
done = function(summary, latency, _)
   local errors = summary.errors
   io.write(string.format('{"requests":%d,"seconds":%f,"p50_us":%d,"p99_us":%d,"errors":%d}\n', summary.requests,
      summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
      errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
