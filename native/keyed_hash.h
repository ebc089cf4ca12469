// The hash of all tables of tokens. Its key is drawn when the process starts, so a client cannot choose tokens that share
// a place. No result depends on it: no table is read in the order of its places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>

namespace lpr {

struct HashKey {
  uint64_t added, first, second;  // the factors are odd

  HashKey() {
    std::random_device device;
    auto draw = [&] { return static_cast<uint64_t>(device()) << 32 | device(); };
    added = draw(), first = draw() | 1, second = draw() | 1;
  }
};

inline const HashKey hash_key;

// Good from bit 20 upwards. The shift brings the high bits of a key into the places that the second product mixes.
inline uint64_t keyed_hash(uint64_t key) {
  uint64_t mixed = (key ^ hash_key.added) * hash_key.first;
  return (mixed ^ mixed >> 32) * hash_key.second;
}

struct KeyedHash {
  size_t operator()(int32_t token) const { return keyed_hash(static_cast<uint32_t>(token)) >> 20; }
};

}  // namespace lpr
