// The words of the two Top16 row formats (contract, section 5).

constexpr int kLegacyWords = 33;
constexpr int kTaggedWords = 32;
constexpr int kReadyWord = 32;  // of a legacy row
constexpr int kReady = 1;
