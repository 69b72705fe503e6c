-- wrk: chat requests of a size whose prompts share half of it, as agents' turns do: in turn from 256 prompts, or with
-- NEW_PROMPTS (a number that differs from run to run) each with another half that nobody has sent before.
local size = tonumber(os.getenv("PROMPT_BYTES"))
local shared = string.rep("the quick brown fox jumps over the lazy dog, ", math.ceil(size / 45)):sub(1, size / 2)
local requests, next_one = {}, 0
local run = os.getenv("NEW_PROMPTS")
local before, after
init = function()
   if run then
      local own = string.rep("prompt of one says this, ", math.ceil(size / 25)):sub(1, size / 2 - 24)
      local body = string.format('{"model":"mock","messages":[{"role":"system","content":"%s"},'
         .. '{"role":"user","content":"%012d%012d%s"}],"max_tokens":1}', shared, tonumber(run), 0, own)
      local whole = wrk.format("POST", "/v1/chat/completions", { ["content-type"] = "application/json" }, body)
      local number = string.format("%012d%012d", tonumber(run), 0)
      local at = whole:find(number, 1, true)
      before, after = whole:sub(1, at + 11), whole:sub(at + 24)
      return
   end
   for i = 1, 256 do
      local own = string.rep(string.format("prompt %d says this, ", i), math.ceil(size / 16)):sub(1, size / 2)
      local body = string.format('{"model":"mock","messages":[{"role":"system","content":"%s"},'
         .. '{"role":"user","content":"%s"}],"max_tokens":1}', shared, own)
      requests[i] = wrk.format("POST", "/v1/chat/completions", { ["content-type"] = "application/json" }, body)
   end
end
request = function()
   if run then
      next_one = next_one + 1
      return before .. string.format("%012d", next_one) .. after
   end
   next_one = next_one % #requests + 1
   return requests[next_one]
end
done = function(summary, latency, _)
   local errors = summary.errors
   io.write(string.format('{"requests":%d,"seconds":%f,"p50_us":%d,"p99_us":%d,"errors":%d}\n', summary.requests,
      summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
      errors.connect + errors.read + errors.write + errors.status + errors.timeout))
end
