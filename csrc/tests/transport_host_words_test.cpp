#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "transport/host_words.h"

namespace distca::transport {
namespace {

bool is_mapped(const void* data, size_t num_bytes) {
  unsigned char residency = 0;
  return mincore(const_cast<void*>(data), num_bytes, &residency) == 0;
}

// What `holds` says in a process forked from this one.
template <typename F>
bool in_forked_process(F&& holds) {
  const pid_t child = fork();
  if (child == 0) _exit(holds() ? EXIT_SUCCESS : EXIT_FAILURE);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS;
}

TEST(HostPage, IsAPageOfZerosThatCanBeWritten) {
  HostPage page;
  auto* words = static_cast<uint32_t*>(page.data());
  const size_t num_words = page.num_bytes() / sizeof(uint32_t);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(words) % page.num_bytes(), 0u);
  EXPECT_TRUE(std::all_of(words, words + num_words, [](uint32_t word) { return word == 0; }));
  std::fill_n(words, num_words, 7u);
  EXPECT_EQ(words[num_words - 1], 7u);
}

TEST(HostPage, IsMissingInForkedProcesses) {
  HostPage page;
  static_cast<uint32_t*>(page.data())[0] = 7;
  const std::vector<uint32_t> others(1, 7);
  EXPECT_TRUE(in_forked_process([&] { return others[0] == 7; }));
  EXPECT_TRUE(in_forked_process([&] { return !is_mapped(page.data(), page.num_bytes()); }));
  EXPECT_EQ(static_cast<uint32_t*>(page.data())[0], 7u);
}

TEST(HostPage, MayBeGivenBackWhereItIsMissing) {
  auto* page = new HostPage;
  EXPECT_TRUE(in_forked_process([&] {
    delete page;
    return true;
  }));
  const void* data = page->data();
  const size_t num_bytes = page->num_bytes();
  EXPECT_TRUE(is_mapped(data, num_bytes));
  delete page;
  EXPECT_FALSE(is_mapped(data, num_bytes));
}

}  // namespace
}  // namespace distca::transport
