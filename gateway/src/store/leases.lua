-- Answers one gateway's questions of the limits that all gateways keep together (gateway/core/src/lease.rs,
-- slots.rs and budget.rs say what a question holds). By this server's clock, so that no gateway's clock matters. All
-- that is said are sums: a question that comes twice, or whose answer was lost, makes nothing wrong.
--
-- KEYS: the gateways that live; what this gateway was granted; then one for each question.
-- ARGV: this gateway, milliseconds of silence after which one is dead; then nine for each question: kind
--       ('rate' or 'slots'), whose it is within this gateway, used (or kept), granted as far as it knows,
--       need, ahead, limit (a millisecond, or at once), burst, what is left where the limit is new. Of a
--       'budget': whose use this gateway says (its file's), how much that is, milliseconds to keep it.
-- Answers the number of gateways, then two for each question: granted and left, held and free, or what others
-- have used of a budget and 0.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + clock[2] / 1000
local gateways, mine = KEYS[1], KEYS[2]
local me, silence = ARGV[1], tonumber(ARGV[2])

-- Every digit: what is read again must be what was written.
local function text(number)
  return string.format('%.17g', number)
end

redis.call('ZADD', gateways, text(now), me)
redis.call('ZREMRANGEBYSCORE', gateways, '-inf', text(now - silence))
redis.call('PEXPIRE', gateways, silence)
local live = redis.call('ZCARD', gateways)

local function rate(key, field, used, claimed, need, ahead, limit, burst, if_new)
  local state = redis.call('HMGET', key, 'level', 'at')
  local level, at = tonumber(state[1]), tonumber(state[2])
  if not level then
    level, at = math.min(burst, if_new), now
  end
  level = math.min(burst, level + math.max(0, now - at) * limit)
  -- Whom the store does not know holds nothing, and owes what it says that it owes.
  local granted = tonumber(redis.call('HGET', mine, field)) or math.min(used, claimed)
  local left = level + granted - used
  local lease = 0
  if left >= 1 then
    local needed = math.min(need, left)
    local further = math.min(ahead, (left - needed) / live)
    -- Requests are whole: a limit of them has no use for parts of one.
    if field:find('^requests') then
      needed, further = math.floor(needed), math.floor(further)
    end
    lease = needed + further
    if lease < 1 then
      lease = 0
    end
  end
  level = math.min(burst, left - lease)
  redis.call('HSET', key, 'level', text(level), 'at', text(math.max(at, now)))
  redis.call('PEXPIRE', key, string.format('%.0f', math.min(31536000000, 60000 + (burst - level) / limit)))
  if lease + need + ahead > 0 then
    redis.call('HSET', mine, field, text(used + lease))
  else
    redis.call('HDEL', mine, field)
  end
  return text(used + lease), text(level)
end

local function slots(key, holder, kept, _, need, ahead, most)
  local others = 0
  local held_by = redis.call('HGETALL', key)
  for i = 1, #held_by, 2 do
    if held_by[i] ~= holder then
      if redis.call('ZSCORE', gateways, held_by[i]:match('^[^ ]*')) then
        others = others + tonumber(held_by[i + 1])
      else
        redis.call('HDEL', key, held_by[i])
      end
    end
  end
  local free = math.max(0, most - others)
  local needed = math.min(need, free)
  local held = needed + math.min(ahead, math.floor((free - needed) / live))
  -- What may be in use is not free, even where it is too much.
  local taken = math.max(held, kept)
  if taken > 0 then
    redis.call('HSET', key, holder, text(taken))
    redis.call('PEXPIRE', key, 60000)
  else
    redis.call('HDEL', key, holder)
  end
  return text(held), text(math.max(0, free - taken))
end

-- Each says the sum of its day or month, which outlives it in its file; so the store may forget all of them.
local function budget(key, file, own, keep)
  if own > 0 then
    redis.call('HSET', key, file, text(own))
    redis.call('PEXPIRE', key, text(keep))
  end
  local others = 0
  local used_by = redis.call('HGETALL', key)
  for i = 1, #used_by, 2 do
    if used_by[i] ~= file then
      others = others + tonumber(used_by[i + 1])
    end
  end
  return text(others), '0'
end

local answers = { live }
local at = 3
for i = 3, #KEYS do
  local kind, whose = ARGV[at], ARGV[at + 1]
  local numbers = {}
  for n = 2, 8 do
    numbers[n - 1] = tonumber(ARGV[at + n])
  end
  local one, other
  if kind == 'rate' then
    one, other = rate(KEYS[i], whose, unpack(numbers))
  elseif kind == 'budget' then
    one, other = budget(KEYS[i], whose, unpack(numbers))
  else
    one, other = slots(KEYS[i], me .. ' ' .. whose, unpack(numbers))
  end
  answers[#answers + 1] = one
  answers[#answers + 1] = other
  at = at + 9
end
redis.call('PEXPIRE', mine, silence)
return answers
