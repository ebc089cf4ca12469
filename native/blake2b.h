// BLAKE2b with an 8-byte digest (RFC 7693), so that the digest of a state is the one that hashlib computes.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace lpr {

class Blake2b {
 public:
  Blake2b() : h_(kStart) { h_[0] ^= 0x01010000 ^ kDigestBytes; }

  void update(const void* data, size_t size) {
    auto bytes = static_cast<const uint8_t*>(data);
    while (size > 0) {
      if (filled_ == kBlock) {  // only when more follows: the last block is compressed by `digest`
        count_ += kBlock;
        compress(h_, buffer_.data(), count_, false);
        filled_ = 0;
      }
      size_t part = std::min(size, kBlock - filled_);
      std::memcpy(buffer_.data() + filled_, bytes, part);
      filled_ += part;
      bytes += part;
      size -= part;
    }
  }

  // Numbers as array("q", ...).tobytes() lays them out.
  template <typename Int>
  void update_words(const Int* values, size_t count) {
    for (size_t i = 0; i < count; i++) {
      int64_t word = values[i];
      update(&word, sizeof word);
    }
  }

  // Of all bytes so far; more may follow. Little-endian, as int.from_bytes(digest, "little").
  uint64_t digest() const {
    auto h = h_;
    auto last = buffer_;
    std::memset(last.data() + filled_, 0, kBlock - filled_);
    compress(h, last.data(), count_ + filled_, true);
    return h[0];
  }

 private:
  static constexpr size_t kBlock = 128;
  static constexpr uint64_t kDigestBytes = 8;
  using State = std::array<uint64_t, 8>;
  static constexpr State kStart = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
                                   0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

  static uint64_t rotate(uint64_t x, int by) { return x >> by | x << (64 - by); }

  static void mix(uint64_t* v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotate(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotate(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotate(v[b] ^ v[c], 63);
  }

  static void compress(State& h, const uint8_t* block, uint64_t count, bool last) {
    static constexpr uint8_t kOrder[10][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
        {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
        {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
        {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
        {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
    uint64_t m[16], v[16];
    std::memcpy(m, block, kBlock);
    for (int i = 0; i < 8; i++) {
      v[i] = h[i];
      v[i + 8] = kStart[i];
    }
    v[12] ^= count;
    if (last) v[14] = ~v[14];
    for (int round = 0; round < 12; round++) {
      const uint8_t* s = kOrder[round % 10];
      mix(v, 0, 4, 8, 12, m[s[0]], m[s[1]]);
      mix(v, 1, 5, 9, 13, m[s[2]], m[s[3]]);
      mix(v, 2, 6, 10, 14, m[s[4]], m[s[5]]);
      mix(v, 3, 7, 11, 15, m[s[6]], m[s[7]]);
      mix(v, 0, 5, 10, 15, m[s[8]], m[s[9]]);
      mix(v, 1, 6, 11, 12, m[s[10]], m[s[11]]);
      mix(v, 2, 7, 8, 13, m[s[12]], m[s[13]]);
      mix(v, 3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++) h[i] ^= v[i] ^ v[i + 8];
  }

  State h_;
  std::array<uint8_t, kBlock> buffer_{};
  size_t filled_ = 0;
  uint64_t count_ = 0;
};

}  // namespace lpr
