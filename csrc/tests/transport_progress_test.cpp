// Calls as ranks compare them, and what tells that two ranks wait for each other.

#include <gtest/gtest.h>

#include "transport/where.h"

namespace distca::transport {
namespace {

Where call(const char* pass, int64_t layer, int64_t step, int64_t caller = -1) {
  return {"dispatch", pass, layer, step, caller};
}

TEST(Where, TagsDifferInStepPassLayerAndCaller) {
  const Where near = call("forward", 5, 1000, 17);
  for (const Where& other : {call("backward", 5, 1000, 17), call("recomputed forward", 5, 1000, 17),
                             call("forward", 6, 1000, 17), call("forward", 5, 1001, 17),
                             call("forward", 5, 1000, 18), call("forward", 5, 1000)}) {
    EXPECT_NE(tag_of(other), tag_of(near)) << describe(other);
    EXPECT_EQ(words_of(where_of(tag_of(other), near)), words_of(other)) << describe(other);
  }
}

TEST(Where, TagsStandForTheNearestCall) {
  // Both fields have begun anew between the two calls.
  const Where far = call("forward", 1025, 513, 3);
  EXPECT_EQ(words_of(where_of(tag_of(far), call("forward", 1020, 510))), words_of(far));
}

TEST(Where, CallersAreNamed) {
  name_caller(41, "layers.3.attention");
  EXPECT_EQ(describe(call("backward", 2, 7, 41)),
            "dispatch of attention layer 2 (layers.3.attention), backward pass, step 7");
  EXPECT_EQ(describe({"plan", "", -1, 7}), "plan, step 7");
}

// Two ranks with their channels, in whose exchanges they wait.
struct Pair {
  Channel mine{"layers"}, theirs{"layers"};
  Wait my_wait, their_wait;

  static Wait wait_in(Channel& channel, const Where& where) {
    return {std::string(1, '0'), channel.name, channel.enter(where), where, "", false, 1.0};
  }
  bool is_stuck() const { return wait_for_each_other(my_wait, mine, their_wait, theirs); }
};

TEST(Progress, RanksInOneExchangeAreNotStuck) {
  Pair pair;
  pair.my_wait = Pair::wait_in(pair.mine, call("forward", 0, 0));
  pair.their_wait = Pair::wait_in(pair.theirs, call("forward", 0, 0));
  EXPECT_FALSE(pair.is_stuck());
}

TEST(Progress, RanksInDifferentCallsAtOnePointAreStuck) {
  Pair pair;
  pair.my_wait = Pair::wait_in(pair.mine, call("forward", 0, 0));
  pair.their_wait = Pair::wait_in(pair.theirs, call("backward", 0, 0));
  EXPECT_TRUE(pair.is_stuck());
}

TEST(Progress, ARankThatIsAheadIsNotStuck) {
  Pair pair;
  pair.mine.enter(call("forward", 0, 0));
  pair.my_wait = Pair::wait_in(pair.mine, call("forward", 1, 0));
  pair.their_wait = Pair::wait_in(pair.theirs, call("forward", 0, 0));
  EXPECT_FALSE(pair.is_stuck());
}

TEST(Progress, ARankAheadThatDidAnotherCallIsStuck) {
  Pair pair;
  pair.mine.enter(call("forward", 0, 0, 1));
  pair.my_wait = Pair::wait_in(pair.mine, call("forward", 1, 0, 2));
  pair.their_wait = Pair::wait_in(pair.theirs, call("forward", 0, 0, 2));
  EXPECT_TRUE(pair.is_stuck());
}

TEST(Progress, ExchangesThatAreForgottenCountAsBegun) {
  Pair pair;
  for (int64_t layer = 0; layer < 100; ++layer) pair.mine.enter(call("forward", layer, 0));
  pair.my_wait = Pair::wait_in(pair.mine, call("forward", 100, 0));
  pair.their_wait = Pair::wait_in(pair.theirs, call("backward", 0, 0));
  EXPECT_FALSE(pair.is_stuck());
}

TEST(Progress, AStreamMayWaitWhileItsHostPlans) {
  Channel my_plans("plans"), their_layers("layers");
  Channel my_layers("layers"), their_plans("plans");
  Wait mine = Pair::wait_in(my_layers, call("forward", 0, 0));
  Wait theirs = Pair::wait_in(their_plans, {"plan", "", -1, 1});
  EXPECT_TRUE(wait_for_each_other(mine, my_plans, theirs, their_layers));
  mine.is_stream = true;
  EXPECT_FALSE(wait_for_each_other(mine, my_plans, theirs, their_layers));
  mine.seconds = theirs.seconds = 5;  // its host has not come for long
  EXPECT_TRUE(wait_for_each_other(mine, my_plans, theirs, their_layers));
  my_plans.enter({"plan", "", -1, 1});
  EXPECT_FALSE(wait_for_each_other(mine, my_plans, theirs, their_layers));
}

TEST(Progress, TravelsAsText) {
  Channel layers("layers"), plans("plans");
  plans.enter({"plan", "", -1, 3});
  Progress sent{Pair::wait_in(layers, call("backward", 2, 3, 9)), {layers, plans}};
  sent.wait.activity = "an agreement on heads_q 4, heads_kv 2";
  sent.wait.is_stream = true;
  const Progress received = Progress::decode(sent.encode());
  EXPECT_EQ(received.wait, sent.wait);
  EXPECT_EQ(received.wait.activity, sent.wait.activity);
  EXPECT_TRUE(received.wait.is_stream);
  ASSERT_NE(received.find("plans"), nullptr);
  EXPECT_TRUE(received.find("plans")->has_entered(0, {"plan", "", -1, 3}));
  EXPECT_FALSE(received.find("plans")->has_entered(1, {"plan", "", -1, 4}));
  EXPECT_FALSE(received.find("layers")->has_entered(0, call("forward", 2, 3, 9)));
}

}  // namespace
}  // namespace distca::transport
