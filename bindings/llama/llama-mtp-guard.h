#pragma once

#include "llama-impl.h"

#include <exception>
#include <new>

// What llama_mtp_get_failure() tells; llama-mtp.cpp has it.
void llama_mtp_note_failure(const char * why, bool out_of_memory) noexcept;

// Runs the body of a C function, which no exception may leave: logs the reason and returns `failed`.
template <typename R, typename F>
R llama_mtp_guard(const char * func, R failed, F body) noexcept {
    const auto fail = [&](const char * why, bool out_of_memory) {
        llama_mtp_note_failure(why, out_of_memory);
        try {
            LLAMA_LOG_ERROR("%s: %s\n", func, why);
        } catch (...) {  // no memory for the message, or a callback that throws
        }
        return failed;
    };
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return fail("out of memory", true);
    } catch (const std::exception & err) {
        return fail(err.what(), false);
    } catch (...) {
        return fail("unknown C++ exception", false);
    }
}
