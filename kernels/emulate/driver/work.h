// Streams: work that waits, captures of it, events between.
#pragma once

#include "state.h"

#define API extern "C" __attribute__((visibility("default"))) int
#define CALL Call call{__func__}
#define CHECK(...) \
    if (Result code = (__VA_ARGS__)) return code

namespace driver {

// Runs what waits on a stream, up to the work of this number. A fault is the context's for good.
inline void run_until(Stream& stream, uint64_t number) {
    while (stream.done < number && !stream.waiting.empty()) {
        Work work = std::move(stream.waiting.front());
        stream.waiting.pop_front();
        ++stream.done;
        if (Result code = stream.context->broken ? SUCCESS : work.run()) stream.context->broken = code;
    }
}

inline void run_all(const Context* context) {
    for (Stream* stream : state.streams)
        if (stream->context == context) run_until(*stream, stream->begun);
}

// Puts work on a stream, or into its capture.
inline Result put(const Call& call, Stream* stream, Work work) {
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    if (stream->context != current) return call.refuse(INVALID_CONTEXT, "a stream of another context");
    if (Capture* capture = stream->capture.get()) {
        if (capture->is_invalid) return CAPTURE_INVALIDATED;
        capture->works.push_back(std::move(work));
        return SUCCESS;
    }
    stream->waiting.push_back(std::move(work));
    ++stream->begun;
    if (state.random.coin()) run_until(*stream, stream->begun);
    return SUCCESS;
}

// What a mistake does to a capture that it happens in.
inline Result spoil(Stream* stream, Result code) {
    if (code && state.streams.count(stream) && stream->capture) stream->capture->is_invalid = true;
    return code;
}

// Whether a stream can be waited for.
inline Result check_wait(const Call& call, Stream* stream) {
    if (!state.streams.count(stream)) return call.refuse(INVALID_HANDLE, "no such stream");
    if (!stream->capture) return SUCCESS;
    stream->capture->is_invalid = true;
    return call.refuse(CAPTURE_UNSUPPORTED, "a stream that is captured cannot be waited for");
}

template <class T>
Result forget(const Call& call, std::set<T*>& all, T* one) {
    if (all.erase(one) == 0) return call.refuse(INVALID_HANDLE, "a handle that is none");
    delete one;
    return SUCCESS;
}

}  // namespace driver
