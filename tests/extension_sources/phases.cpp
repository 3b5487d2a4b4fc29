// Lets this process sleep or die when it enters phases of attention (see csrc/ops/timeline.h).
#include <ATen/record_function.h>
#include <signal.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>

namespace {

struct Action {
  std::string phase;
  double sleep_s;
  double kill_after_s;
};

std::mutex mutex;
Action action;
double max_delay_s = 0;
std::mt19937 delays;

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& range) {
  Action now;
  {
    std::lock_guard lock(mutex);
    if (action.phase.empty() || action.phase != range.name()) return nullptr;
    now = std::exchange(action, {});
  }
  sleep_for(now.sleep_s);
  if (now.kill_after_s == 0) kill(getpid(), SIGKILL);
  if (now.kill_after_s > 0) {
    std::thread([seconds = now.kill_after_s] {
      sleep_for(seconds);
      kill(getpid(), SIGKILL);
    }).detach();
  }
  return nullptr;
}

void at_phase(std::string phase, double sleep_s, double kill_after_s) {
  static const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(enter));
  std::lock_guard lock(mutex);
  action = {std::move(phase), sleep_s, kill_after_s};
}

std::unique_ptr<at::ObserverContext> delay(const at::RecordFunction& range) {
  if (!std::string_view(range.name()).starts_with("distca ")) return nullptr;
  double seconds = 0;
  {
    std::lock_guard lock(mutex);
    seconds = std::uniform_real_distribution(0.0, max_delay_s)(delays);
  }
  sleep_for(seconds);
  return nullptr;
}

void delay_phases(double max_s, int64_t seed) {
  static const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(delay));
  std::lock_guard lock(mutex);
  max_delay_s = max_s;
  delays.seed(seed);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(distca_tests, m) {
  m.def("at_phase(str phase, float sleep_s, float kill_after_s) -> ()", at_phase);
  m.def("delay_phases(float max_s, int seed) -> ()", delay_phases);
}
