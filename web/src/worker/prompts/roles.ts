/** Roles of messages that a chat template knows: others it would pass over without a word. */

import { ROLES } from "../../format/constants.js";
import { RequestError } from "../../protocol/errors.js";
import type { ChatMessage } from "../../protocol/openai.js";

/** RequestError for a message of a role that is not among the usual ones and that the template does not name. */
export function checkRoles(messages: readonly ChatMessage[], template: string): void {
  const strange = messages.find(
    ({ role }) => !(ROLES as readonly string[]).includes(role) && !template.includes(role),
  );
  if (strange)
    throw new RequestError(
      `messages: this model's chat template knows no role "${strange.role}", and would pass over the message; ` +
        `there are ${ROLES.join(", ")}`,
      "messages",
    );
}
