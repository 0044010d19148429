// Linked into every test: upstream's logger writes from a thread of its own and is never taken down
// (common/log.cpp says why), so the last lines of a program that just ends are now and then lost.
#include "log.h"

namespace {
struct at_exit {
    ~at_exit() { common_log_pause(common_log_main()); }  // returns when the queue is written
} flush_log;
}  // namespace
